"""
Optical flow: an update block until it has nothing more to say
==============================================================

How far has each pixel of a picture moved in the next? RAFT (Teed & Deng 2020) looks up what a pixel would match around the
place where the present flow says that it went; a convolutional GRU makes a correction of that, a dozen times:

.. math:: h \\leftarrow h + g \\cdot (\\hat h - h), \\quad \\hat h = \\tanh(C[r \\cdot h,\\; \\mathrm{lookup}(w),\\; x]),
          \\qquad w \\leftarrow w + D h.

Bai et al. (2022, "Deep equilibrium optical flow estimation") go on until nothing changes. Then :math:`D h = 0` and
:math:`\\hat h = h`, whatever the gate :math:`g`, and of :math:`w` nothing is said. So the block here has no gate, which is a
step size and the solver's business, and :math:`w = D h`. Both learn random textures moved by up to two pixels.

*Checked:* the equilibrium against damped steps, its gradient against differences; the error on new pictures beside that of
the original after as many training steps.
"""

import time
import warnings

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.functional import avg_pool2d, grid_sample, interpolate, unfold

from implicitkit_deq import DEQ, Cell, ForgivenWarning, Pretraining, jacobian_penalty

n, hidden, reach = 16, 16, 2
shapes = (hidden, n, n), (2, n, n)  # of h and w
pixels = torch.stack(torch.meshgrid(torch.arange(n), torch.arange(n), indexing="xy"))  # x first, as for grid_sample
error = lambda state, flow: (state[1] - flow).norm(dim=1).mean()  # noqa: E731  in pixels


def moved(picture, flow):
    return grid_sample(picture, (pixels + flow).movedim(1, -1) / (n - 1) * 2 - 1, "bilinear", "border", True)


def scenes(count):
    """Two pictures each and the flow between them: the second, looked up at ``p + flow(p)``, is the first."""
    second = interpolate(torch.randn(count, 3, n // 2, n // 2), (n, n), mode="bicubic")
    flow = interpolate(torch.randn(count, 2, 3, 3), (n, n), mode="bicubic").clamp(-reach, reach)
    return moved(second, flow), second, flow


class Update(Cell):
    def __init__(self, original=False):
        super().__init__()
        parts = (3, hidden), (27, hidden), (48, (1 + original) * hidden), (48, hidden), (hidden, 2)
        self.context, self.motion, self.gates, self.new, self.head = (nn.Conv2d(*p, 3, padding=1) for p in parts)

    def update(self, state, first, second):
        h, w = state
        there = unfold(moved(second, w), 2 * reach + 1, padding=reach).view(len(h), 3, -1, n, n)
        unlike = avg_pool2d((there - first.unsqueeze(2)).square().sum(1), 3, 1, 1)  # as a correlation, of the pictures
        match = torch.softmax(-3 * unlike, 1)
        seen = torch.cat([torch.relu(self.motion(torch.cat([match, w], 1))), torch.relu(self.context(first))], 1)
        reset, *gate = torch.sigmoid(self.gates(torch.cat([h, seen], 1))).split(hidden, 1)
        new = torch.tanh(self.new(torch.cat([reset * h, seen], 1)))
        h = h + gate[0] * (new - h) if gate else new
        return h, w + self.head(h) if gate else self.head(h)


def steps(cell, pair, count, part=1.0):
    """``count`` plain steps from zero, each of them gone a part of the way."""
    h, w = (pair[0].new_zeros(len(pair[0]), *s) for s in shapes)
    for _ in range(count):
        h, w = (torch.lerp(old, new, part) for old, new in zip((h, w), cell((h, w), *pair), strict=True))
    return h, w


# %%
# The original: 24 steps without derivative, then one with. Ours: 100 times six steps, which is cheap, then to the end.


def original(*pair):
    with torch.no_grad():
        state = steps(raft, pair, 24)
    return raft(state, *pair)


warnings.simplefilter("ignore", ForgivenWarning)  # of one picture in one step
torch.manual_seed(1)
raft = Update(original=True)
strict = {"rtol": 1e-4, "on_failure": "warn"}
layer = DEQ(Update(), shapes, rtol=1e-2, evaluation=strict, pretraining=Pretraining(100, 6))
for name, module, block in (("original", raft, original), ("equilibrium", layer, layer)):
    optimiser, seconds = torch.optim.Adam(module.parameters(), lr=4e-3), -time.process_time()
    for _ in range(130):
        *pair, flow = scenes(12)
        loss = error(block(*pair), flow)
        if block is layer and layer.solution is not None:
            loss = loss + 0.3 * jacobian_penalty(layer.cell, layer.solution.value, tuple(pair))
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
    print(f"130 training steps, {name}: {seconds + time.process_time():.0f} s")

layer.eval()
first, second, truth = scenes(32)
with torch.no_grad():
    found = layer(first, second)
    theirs = {k: float(error(steps(raft, (first, second), k), truth)) for k in (6, 12, 24, 100, 400)}
wrong, still, evaluations = error(found, truth), truth.norm(dim=1).mean(), layer.solution.evaluations
print(f"pixels wrong: {wrong:.2f} after {evaluations} evaluations; {still:.2f} if nothing moved; the original's steps:")
print(", ".join(f"{e:.2f} after {k}" for k, e in theirs.items()))
assert wrong < 0.2 * still and wrong < 1.5 * min(theirs.values()) and layer.solution.converged.double().mean() > 0.9

# %%
# Value and gradient in double precision. Steps that go a part of the way only are what a gate makes of them.

layer.double()
pair, goal = (first[:2].double(), second[:2].double()), truth[:2].double()
with layer.using(rtol=1e-10), torch.no_grad():
    exact, slow = layer(*pair), steps(layer.cell, pair, 800, 0.2)
print(f"the equilibrium and 800 damped steps differ by {float((exact[1] - slow[1]).abs().max()):.0e}")
assert torch.allclose(exact[1], slow[1], atol=1e-6)
weights = list(layer.parameters())
along = torch.randn_like(start := nn.utils.parameters_to_vector(weights).detach())


def gradient(rule):
    with layer.using(rtol=1e-10, rule=rule):
        return torch.cat([g.flatten() for g in torch.autograd.grad(error(layer(*pair), goal), weights)])


def at(h):
    nn.utils.vector_to_parameters(start + h * along, weights)
    with torch.no_grad(), layer.using(rtol=1e-10):
        return float(error(layer(*pair), goal))


full, one = gradient("implicit"), gradient("one_step")
slope, difference = float(full @ along), (at(1e-7) - at(-1e-7)) / 2e-7
cosine = torch.cosine_similarity(full, one, dim=0)
print(f"slope {slope:.4f}, by differences {difference:.4f}; cosine with the gradient of one step {cosine:.2f}")
assert abs(slope - difference) < 1e-3 * abs(difference)

figure, axes = plt.subplots(1, 4, figsize=(10, 2.8), layout="constrained")
axes[0].imshow((0.5 + 0.2 * first[0].movedim(0, -1)).clamp(0, 1))
for ax, w in zip(axes[1:], (truth, found[1]), strict=False):
    ax.quiver(*pixels, *w[0], angles="xy", scale_units="xy", scale=1)
for ax, title in zip(axes, ("a picture", "how far its pixels move", "the equilibrium"), strict=False):
    ax.set(title=title, xticks=[], yticks=[], aspect="equal", ylim=(n - 0.5, -0.5))
axes[3].semilogx(theirs.keys(), theirs.values(), "o-", [evaluations], [wrong], "s")
axes[3].set(xlabel="evaluations", ylabel="mean error, pixels", ylim=0)
axes[3].legend(["the original", "the equilibrium"])
plt.show()
