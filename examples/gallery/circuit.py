"""
A transistor at rest: operating points of a circuit
===================================================

The common-emitter stage of every textbook: a supply of 12 V, four resistors, and a bipolar transistor by Ebers and Moll
(1954). Kirchhoff's law at the base, the collector and the emitter is a root with three unknowns, steep beyond what a plain
Newton iteration stands, here for eighty inputs at once. Derivatives are what an engineer asks for: the gain, the drift by
temperature, the tolerance of the parts; and the transistor's own parameters are identified from a measured curve.

*Checked:* operating points against SciPy, currents against Kirchhoff's law for the whole circuit; the gain against
differences and the textbook's ``-Rc / Re``; the parameters are found.
"""

import matplotlib.pyplot as plt
import scipy.optimize
import torch

import implicitkit as ik

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
supply, Rb, Rc, Re = 12.0, 10e3, 4.7e3, 1e3  # volts, ohms


def ebers_moll(vbe, vbc, log_Is, beta, celsius):
    """Collector and base current in milliamperes, for a saturation current ``exp(log_Is)`` mA at 27 C."""
    vt = 8.617e-5 * (celsius + 273.15)
    Is = torch.exp(log_Is + 1.12 / (8.617e-5 * 300.15) - 1.12 / vt)  # the band gap of silicon is 1.12 eV
    forward, reverse = torch.expm1(vbe / vt), torch.expm1(vbc / vt)
    return Is * (forward - 1.5 * reverse), Is * (forward / beta + reverse / 2)  # reverse gain 2


def kirchhoff(v, source, log_Is, beta, celsius):
    """Currents in milliamperes that flow into the nodes: base, collector, emitter."""
    base, collector, emitter = v.unbind(-1)
    ic, ib = ebers_moll(base - emitter, base - collector, log_Is, beta, celsius)
    return torch.stack(
        [1e3 * (source - base) / Rb - ib, 1e3 * (supply - collector) / Rc - ic, ic + ib - 1e3 * emitter / Re], -1
    )


log_Is, beta, warm = torch.tensor(1e-11).log(), torch.tensor(150.0), torch.tensor(27.0)


def operate(source, log_Is=log_Is, beta=beta, celsius=warm):
    """Voltages of the three nodes, (inputs, 3)."""
    start = torch.tensor([0.6, 6.0, 0.1]).expand(*source.shape, 3)
    parts = (source, log_Is, beta, celsius)
    return ik.root(kirchhoff, start, parts, batch_dims=source.ndim, in_dims=(0, None, None, None)).value


source = torch.linspace(0.0, 4.0, 80)
v = operate(source)
for k in (5, 25, 70):
    args = (source[k], log_Is, beta, warm)
    theirs = scipy.optimize.root(lambda u, a=args: kirchhoff(torch.as_tensor(u), *a).numpy(), v[k].numpy() + 0.01)
    assert theirs.success and abs(theirs.x - v[k].numpy()).max() < 1e-7
into = (source - v[:, 0]) / Rb + (supply - v[:, 1]) / Rc - v[:, 2] / Re
assert into.abs().max() < 1e-12  # amperes: what flows in flows out

# %%
# The gain of the stage, and its drift: derivatives of the operating point.

gain = torch.func.grad(lambda s: operate(s)[:, 1].sum())(source)
difference = (operate(source + 1e-5)[:, 1] - operate(source - 1e-5)[:, 1]) / 2e-5
assert torch.allclose(gain, difference, atol=1e-5)
drift = torch.func.jacfwd(lambda t: operate(source, celsius=t)[:, 1])(warm)
middle = int((source - 1.7).abs().argmin())
print(f"gain at 1.7 V: {float(gain[middle]):.2f}, textbook {-Rc / Re:.2f}; drift {1e3 * float(drift[middle]):.1f} mV/K")
assert abs(float(gain[middle]) + Rc / Re) < 0.15 * Rc / Re and float(drift[middle]) < 0

# %%
# Identification: a measured curve tells the current gain and the saturation current.

measured = operate(source, log_Is + 0.7, torch.tensor(90.0)) + 0.005 * torch.randn(80, 3)
unknown = torch.stack([log_Is, beta.log()])


def misfit(unknown, measured):
    return (operate(source, unknown[0], unknown[1].exp()) - measured) / 0.005


fit = ik.least_squares(misfit, unknown, (measured,))
slopes = torch.func.jacfwd(misfit)(fit.value, measured).reshape(-1, 2)
deviation = torch.linalg.inv(slopes.T @ slopes).diag().sqrt()
print(f"current gain {float(fit.value[1].exp()):.1f} +- {float(deviation[1] * fit.value[1].exp()):.1f}, true 90")
print(
    f"log of the saturation current {float(fit.value[0] - log_Is):.3f} +- {float(deviation[0]):.3f} above, true 0.700"
)
truth = torch.stack([log_Is + 0.7, torch.tensor(90.0).log()])
assert bool(((fit.value - truth).abs() < 4 * deviation).all())

figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for k, name in enumerate(("base", "collector", "emitter")):
    (line,) = axes[0].plot(source, v[:, k], label=name)
    axes[0].plot(source, measured[:, k], ".", ms=3, color=line.get_color(), alpha=0.6)
axes[0].set(xlabel="input, V", ylabel="voltage of the node, V", title="lines: as designed; dots: another transistor")
axes[0].legend()
axes[1].plot(source, gain, label="gain")
axes[1].axhline(-Rc / Re, ls=":", color="grey", label="-Rc / Re")
axes[1].set(xlabel="input, V", ylabel="gain", title="cut off, amplifying, saturated")
axes[1].legend(loc="upper center")
plt.show()
