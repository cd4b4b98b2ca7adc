"""Where registered parts come from: the rooms of this library, and distributions that name an entry point.

Nothing is imported before somebody asks for a name that is not known yet, or for a list.  Then, in this order: the rooms
announced by ``implicitkit/__init__.py`` (those with a prefix, such as SciPy's solvers, only when a name begins with it),
then every entry point of the group ``implicitkit.plugins``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import threading
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import metadata

import torch

GROUP = "implicitkit.plugins"
"""The entry-point group in which a distribution names the module that registers its parts."""


class PluginWarning(RuntimeWarning):
    """A plugin could not be loaded; everything else works."""


@dataclass(frozen=True)
class PluginInfo:
    """One entry point in the group ``implicitkit.plugins``; ``error`` is empty when it loaded."""

    name: str
    distribution: str
    version: str
    module: str
    loaded: bool
    error: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}" + (f" ({self.error})" if self.error else "")


_rooms: dict[str, str] = {}  # module -> the prefix of the names it registers, "" if they have none
_plugins: dict[tuple[str, str, str, str], PluginInfo] = {}
_scan_lock = threading.RLock()  # held while plugins are imported, never while a part is added to a table
_scanned = False
_loading: ContextVar[PluginInfo | None] = ContextVar("_loading", default=None)


def announce(module: str, prefix: str = "") -> None:
    """Say that ``module`` registers parts when it is imported (those whose names begin with ``prefix``)."""
    _rooms[module] = prefix


def prepare(name: str) -> None:
    """Import the rooms that may register ``name``."""
    for module, prefix in _rooms.items():
        if name.startswith(prefix):
            importlib.import_module(module)


def loading() -> PluginInfo | None:
    """The plugin that is being imported by its entry point, if any."""
    return _loading.get()


def owner(package: str) -> str:
    """The distribution whose plugin is this top-level package; the package itself if none."""
    for info in _plugins.values():
        if info.module.partition(".")[0] == package:
            return info.distribution
    return package


def plugins() -> list[PluginInfo]:
    """Every plugin found, loaded or broken."""
    load_all()
    return sorted(_plugins.values(), key=lambda p: (p.distribution, p.name))


def broken() -> list[PluginInfo]:
    """The plugins that could not be loaded."""
    return [info for info in _plugins.values() if not info.loaded]


def load_all() -> None:
    """Import every room and every plugin that has not been imported yet.

    Warns:
        PluginWarning: some plugins could not be loaded.
    """
    for module in list(_rooms):
        importlib.import_module(module)
    global _scanned
    failed: list[PluginInfo] = []
    with _scan_lock:
        if _scanned:
            return
        _scanned = True  # before loading: a plugin may look names up itself
        before = dict(_plugins)
        try:
            for key, point in _entry_points():
                info = before.get(key)
                if info is None or not info.loaded:
                    info = _load(point)
                    if not info.loaded:
                        failed.append(info)
                _plugins[key] = info
        except BaseException:  # interrupted: the next look-up goes on with those that are left
            _scanned = False
            raise
    if failed:
        warnings.warn(
            "plugins that failed to load: " + "; ".join(map(str, failed)) + ". Everything else works; see "
            "`python -m implicitkit list plugins`.",
            PluginWarning,
            stacklevel=3,
        )


def _entry_points() -> Iterator[tuple[tuple[str, str, str, str], metadata.EntryPoint]]:
    """Entry points of the group, each once (an editable install can be found twice on the path)."""
    seen = set()
    for point in metadata.entry_points(group=GROUP):
        dist = point.dist
        key = (dist.name if dist else "?", dist.version if dist else "?", point.name, point.value)
        if key not in seen:
            seen.add(key)
            yield key, point


def _load(point: metadata.EntryPoint) -> PluginInfo:
    dist = point.dist
    info = PluginInfo(point.name, dist.name if dist else "?", dist.version if dist else "?", point.value, True)
    token = _loading.set(info)
    try:
        with _defaults_kept():
            target = point.load()
            if inspect.isfunction(target):
                target()
    except (Exception, SystemExit) as error:  # whatever a stranger's module does wrong, the others still load
        text = " ".join(str(error).split())
        return dataclasses.replace(info, loaded=False, error=f"{type(error).__name__}: {text}")
    finally:
        _loading.reset(token)
    return info


@contextlib.contextmanager
def _defaults_kept() -> Iterator[None]:
    """What a plugin's import does to torch's global defaults is undone: a look-up of a name must not change results."""
    dtype, grad, threads = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    device = torch.get_default_device()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            torch.use_deterministic_algorithms(deterministic)
