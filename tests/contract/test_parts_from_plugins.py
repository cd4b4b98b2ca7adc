"""A kind, a constraint, a QP solver, a constrained solver and a strategy: five distributions of one file each."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

PARTS = Path(__file__).parent / "parts"
NAMES = ("complementarity", "within", "admm", "uzawa", "multistart")


@pytest.fixture(scope="module", params=["laid out", pytest.param("by pip", marks=pytest.mark.slow)])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An interpreter, and where it finds the five plugins: as pip would lay them out, in the time of a copy, or installed by
    pip into a fresh environment, to which everything else is lent by this one."""
    home = tmp_path_factory.mktemp("environment")
    if request.param == "laid out":
        return Path(sys.executable), _laid_out(home)
    venv.create(home, with_pip=False, symlinks=sys.platform != "win32")
    paths = {"base": str(home), "platbase": str(home)}
    borrowed = Path(sysconfig.get_path("purelib", "venv", paths)) / "borrowed.pth"
    borrowed.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    python = Path(sysconfig.get_path("scripts", "venv", paths)) / "python"
    sources = [shutil.copytree(PARTS / name, home / name) for name in NAMES]  # building writes there
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index",
         "--no-build-isolation", *map(str, sources)], capture_output=True, text=True, timeout=240, cwd=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return python, home


def _laid_out(home: Path) -> Path:
    for name in NAMES:
        shutil.copy(PARTS / name / f"implicitkit_{name}.py", home)
        about = home / f"implicitkit_{name}-0.1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: implicitkit-{name}\nVersion: 0.1.0\n")
        (about / "entry_points.txt").write_text(f"[implicitkit.plugins]\n{name} = implicitkit_{name}\n")
    return home


HEAD = "import torch, implicitkit as ik\ntorch.set_default_dtype(torch.float64)\n"
USES = {
    # z >= 0, Mz + q >= 0, z'(Mz + q) = 0: one unknown is free, one at zero; the derivative is that of the free one
    "complementarity": """
from implicitkit_complementarity import Complementarity
M, q = torch.tensor([[2.0, 0.5], [0.5, 2.0]]), torch.tensor([-2.0, 1.0], requires_grad=True)
s = ik.solve(Complementarity(lambda z, q: M @ z + q), torch.ones(2), (q,))
torch.testing.assert_close(s.value.detach(), torch.tensor([1.0, 0.0]))
assert s.solver == "projected_steps", s.solver
s.value.sum().backward()
torch.testing.assert_close(q.grad, torch.tensor([-0.5, 0.0]))
assert "complementarity" in ik.problems()
""",
    # the projection of (2, 0.2) on 0 <= z <= 1 by a constraint: (1, 0.2), with derivative (0, 1)
    "within": """
from implicitkit_within import Within
x = torch.tensor([2.0, 0.2], requires_grad=True)
s = ik.argmin(lambda z, x: 0.5 * (z - x).square().sum(), torch.zeros(2), (x,), constraints=[Within(lambda z, x: z)])
torch.testing.assert_close(s.value.detach(), torch.tensor([1.0, 0.2]))
s.value.sum().backward()
torch.testing.assert_close(x.grad, torch.tensor([0.0, 1.0]))
try:
    ik.argmin(lambda z: z.sum(), torch.zeros(2), constraints=[lambda z: z])
except TypeError as error:
    assert "ik.Inequality" in str(error)
else:
    raise AssertionError("an unknown constraint was accepted")
""",
    "admm": """
q = torch.tensor([-1.0, -4.0], requires_grad=True)
problem = ik.QuadraticProgram(torch.eye(2), q, torch.ones(1, 2), torch.ones(1), torch.eye(2), torch.full((2,), 0.9))
s = ik.solve(problem, solver="plugin_admm")
torch.testing.assert_close(s.value.detach(), torch.tensor([0.1, 0.9]), rtol=1e-6, atol=1e-6)
torch.testing.assert_close(s.value.detach(), ik.solve(problem).value.detach(), rtol=1e-6, atol=1e-6)
""",
    # minimise |z - x|^2 / 2 on z_1 + z_2 = 1, z_1 >= 0
    "uzawa": """
x = torch.tensor([1.0, 2.0], requires_grad=True)
constraints = [ik.Equality(lambda z, x: z.sum() - 1), ik.Inequality(lambda z, x: -z[0] - 1)]
solve = lambda solver: ik.argmin(lambda z, x: 0.5 * (z - x).square().sum(), torch.zeros(2), (x,),
                                 constraints=constraints, solver=solver)
s = solve("uzawa")
torch.testing.assert_close(s.value.detach(), torch.tensor([0.0, 1.0]))
(g,) = torch.autograd.grad(s.value[0], x)
torch.testing.assert_close(g, torch.tensor([0.5, -0.5]))
assert s.solver == "uzawa"
""",
    # z^3 - 2z + 2 = 0: Newton from 0.5 without line search may cycle; some start does it
    "multistart": """
f = lambda z, x: z**3 - x * z + 2
x = torch.tensor(2.0, requires_grad=True)
s = ik.root(f, torch.full((3, 1), 1.0), (x,), batch_dims=1, solver=ik.extend.get_solver("multistart", scales=(1.0, -2.0)))
torch.testing.assert_close(f(s.value, x).detach(), torch.zeros(3, 1), rtol=0, atol=1e-9)
s.value.sum().backward()
z = s.value.detach()
torch.testing.assert_close(x.grad, (z / (3 * z**2 - 2)).sum())
ik.testing.check_solver("multistart", checks=["finds_known_solutions", "batch_equals_loop", "gradient_of_the_solution"])
""",
}


SCRIPT = """
import json, sys, traceback
said = {}
for name, code in json.load(sys.stdin).items():
    try:
        exec(code, {"__name__": name})
    except BaseException:
        said[name] = traceback.format_exc()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def faults(python: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong, by name, where one program uses all five after one another."""
    interpreter, home = python
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(home)]))
    uses = json.dumps({name: HEAD + USES[name] for name in NAMES})
    done = subprocess.run(
        [str(interpreter), "-c", SCRIPT], input=uses, env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, timeout=240, cwd=tmp_path_factory.mktemp("user"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", NAMES)
def test_part(name: str, faults: dict[str, str]) -> None:
    assert name not in faults, faults[name]


@pytest.mark.parametrize("name", NAMES)
def test_part_is_one_file_behind_the_public_api(name: str) -> None:
    (module,) = (PARTS / name).glob("*.py")
    tree = ast.parse(module.read_text())
    deep = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("implicitkit")]
    private = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr.startswith("_")]
    assert not deep and not private
