"""A multiscale DEQ on scikit-learn's handwritten digits, and Grad-CAM saliency through its equilibrium.

    python examples/deq_mnist_like.py

1,797 real images of 8 x 8 pixels; two resolutions reach their equilibrium together.  Grad-CAM weighs the channels of the
equilibrium by the gradient of the class score, where the gradient passes through the implicit layer again (the feature is
perturbed at the input of the solve); it must be what an unrolled network of many layers gives.

Source: Bai, Koltun & Kolter (2020), "Multiscale deep equilibrium models"; Selvaraju et al. (2017), "Grad-CAM".
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from common import figure, options, table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq import DEQ, bound_weights, cells, jacobian_penalty, spectral_radius


class Result(NamedTuple):
    """Test accuracy, spectral radius of the Jacobian on test images (largest), the largest difference of the two saliency
    maps, evaluations (forward, backward), seconds."""

    accuracy: float
    radius: float
    saliency_error: float
    evaluations: tuple[int, int]
    seconds: float


class Classifier(nn.Module):
    """Multiscale equilibrium of an image, pooled and read out."""

    def __init__(self, channels: tuple[int, ...] = (24, 24), classes: int = 10) -> None:
        super().__init__()
        cell = cells.Multiscale(1, channels, groups=8)
        bound_weights(cell, 0.1, weights=[branch.second.weight for branch in cell.branches])  # the state's way into f
        self.layer = DEQ(
            cell,
            rule=ik.Implicit("gmres", rtol=1e-2),
            rtol=1e-2,
            atol=0.0,
            evaluation={"rtol": 1e-4},
        )
        self.read = nn.Linear(sum(channels) * 4, classes)

    def head(self, z: tuple[Tensor, ...]) -> Tensor:
        """Every resolution pooled to 2 x 2."""
        return self.read(torch.cat([nn.functional.adaptive_avg_pool2d(t, 2).flatten(1) for t in z], 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x))


def digits(seed: int) -> tuple[Tensor, ...]:
    """Images ``(m, 1, 8, 8)`` in [0, 1] and labels: 1,437 to train on, 360 to test on."""
    data = load_digits()
    x_train, x_test, y_train, y_test = train_test_split(
        data.images, data.target, test_size=360, random_state=seed, stratify=data.target
    )
    images = (torch.tensor(x, dtype=torch.float32).unsqueeze(1) / 16 for x in (x_train, x_test))
    return (*images, torch.tensor(y_train), torch.tensor(y_test))


def shifted(x: Tensor) -> Tensor:
    """Images moved by up to one pixel, each its own way."""
    padded = nn.functional.pad(x, (1, 1, 1, 1))
    i, j = (torch.randint(3, (len(x), 1, 1)) + torch.arange(8).view(shape) for shape in ((1, 8, 1), (1, 1, 8)))
    return padded[torch.arange(len(x)).view(-1, 1, 1), 0, i, j].unsqueeze(1)


def train(x: Tensor, y: Tensor, epochs: int, seed: int) -> tuple[Classifier, tuple[int, int]]:
    """The classifier, and the evaluations of its last step."""
    torch.manual_seed(seed)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-3)
    batches = -(-len(x) // 96)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=epochs * batches)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(96):
            images = shifted(x[rows])
            loss = nn.functional.cross_entropy(model(images), y[rows], label_smoothing=0.05)
            solution = model.layer.solution
            assert solution is not None
            state = tuple(t.detach() for t in solution.value)
            loss = loss + 0.3 * jacobian_penalty(model.layer.cell, state, (images,))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    assert solution is not None and solution.backward is not None
    return model.eval(), (solution.evaluations, int(solution.backward.steps.max()))


def grad_cam(score: Tensor, feature: Tensor) -> Tensor:
    r"""``relu(\sum_k a_k A_k)`` with ``a_k`` the mean over the image of ``d score / d A_k``, scaled to at most 1."""
    (gradient,) = torch.autograd.grad(score, feature)
    weights = gradient.mean((2, 3), keepdim=True)
    cam = torch.relu((weights * feature.detach()).sum(1))
    return cam / cam.amax((1, 2), keepdim=True).clamp_min(torch.finfo(cam.dtype).tiny)


def saliency(model: Classifier, x: Tensor, layers: int | None) -> Tensor:
    """Grad-CAM at the injected features ``U * x``, through the equilibrium (``None``) or through that many layers."""
    cell = model.layer.cell
    injected = cell.inject(x)[0].detach().requires_grad_()
    z0 = tuple(x.new_zeros(len(x), *shape) for shape in cell.state_shape(x))
    if layers is None:
        z = ik.fixed_point(cell.update, z0, (injected,), batch_dims=1, rtol=1e-10, atol=1e-12, max_steps=500).value
    else:
        z = z0
        for _ in range(layers):
            z = cell.update(z, injected)
    score = model.head(z).max(1).values.sum()
    return grad_cam(score, injected)


def main(arguments: list[str] | None = None) -> Result:
    """Train, test, and compare the saliency maps."""
    parser = options(__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    chosen = parser.parse_args(arguments)
    x_train, x_test, y_train, y_test = digits(chosen.seed)
    start = time.perf_counter()
    model, evaluations = train(x_train, y_train, 1 if chosen.quick else chosen.epochs, chosen.seed)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        accuracy = float((model(x_test).argmax(1) == y_test).float().mean())
        assert model.layer.solution is not None
        radius = float(spectral_radius(model.layer.cell, model.layer.solution.value, (x_test,)).max())
    exact = model.double()
    sample = x_test[:6].double()
    implicit, unrolled = saliency(exact, sample, None), saliency(exact, sample, 60 if chosen.quick else 300)
    error = float((implicit - unrolled).abs().max())
    rows = [
        ("test accuracy", f"{accuracy:.4f}"),
        ("evaluations, forward + backward, last step", "{} + {}".format(*evaluations)),
        ("spectral radius of the Jacobian, largest on test images", f"{radius:.3f}"),
        ("parameters", str(sum(p.numel() for p in model.parameters()))),
        ("seconds of training", f"{seconds:.0f}"),
        ("Grad-CAM, implicit against unrolled, largest difference", f"{error:.1e}"),
    ]
    print(table("Multiscale DEQ on handwritten digits", ("", "value"), rows))
    title = "Grad-CAM through the equilibrium (white: the digit)"
    with figure(chosen.output / "deq_mnist_like.png", 6, title=title, size=(9.0, 2.2)) as axes:
        for axis, image, cam in zip(axes, sample[:, 0], implicit, strict=True):
            axis.imshow(cam.detach().numpy(), cmap="magma")
            axis.contour(image, levels=[0.5], colors="white", linewidths=1.5)
            axis.axis("off")
    return Result(accuracy, radius, error, evaluations, seconds)


if __name__ == "__main__":
    main()
