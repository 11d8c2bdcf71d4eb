"""Forms of all kinds with random codes, their weights in float64, and prepared inputs."""

from dataclasses import dataclass

import pytest
import torch

from llmrun.kernels.forms import Dense, Form, GroupInt, Lut16
from llmrun.kernels.gpu.arrays import Prepared, Workspace
from llmrun.kernels.reference.arrays import as_tensor, to_host

BF16, F16, F32, U8 = torch.bfloat16, torch.float16, torch.float32, torch.uint8
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kind:
    """What a form is made of; ``group`` 0 is a whole row; ``mins`` None: none."""

    form: str
    group: int
    scales: torch.dtype
    mins: torch.dtype | None = None
    k: int = 0


KINDS = {
    "w4 g128 bf16": Kind("w4", 128, BF16, k=384),
    "w4 g64 f16": Kind("w4", 64, F16, k=192),
    "w4 g32 f32": Kind("w4", 32, F32, k=160),
    "w4 g16 bf16": Kind("w4", 16, BF16, k=144),
    "w4 row f32": Kind("w4", 0, F32, k=130),
    "w4 g32 f16 +min f16": Kind("w4", 32, F16, F16, k=288),
    "w4 g128 bf16 +zero": Kind("w4", 128, BF16, U8, k=256),
    "w4 g16 f32 +min f32": Kind("w4", 16, F32, F32, k=80),
    "w8 g128 bf16": Kind("w8", 128, BF16, k=256),
    "w8 g32 f16": Kind("w8", 32, F16, k=96),
    "w8 g16 f32": Kind("w8", 16, F32, k=208),
    "w8 row bf16": Kind("w8", 0, BF16, k=129),
    "w8 g64 bf16 +min bf16": Kind("w8", 64, BF16, BF16, k=192),
    "w8 g32 f32 +zero": Kind("w8", 32, F32, U8, k=32),
    "lut g64 bf16": Kind("lut", 64, BF16, k=192),
    "lut g32 f32": Kind("lut", 32, F32, k=224),
    "lut g128 f16": Kind("lut", 128, F16, k=128),
    "bf16": Kind("dense", 0, BF16, k=264),
    "bf16 odd": Kind("dense", 0, BF16, k=131),
    "f16": Kind("dense", 0, F16, k=200),
    "f32": Kind("dense", 0, F32, k=72),
}


class Made:
    """Makes the inputs of the tests, seeded by what is asked for."""

    cpu = CPU

    def form(self, kind: Kind, n: int, seed: int = 0) -> Form:
        """A random form with n rows."""
        k, group = kind.k, kind.group or kind.k
        random = torch.Generator().manual_seed(seed)
        scales = torch.randn(n, k // group, generator=random) / 8  # some of them negative
        if kind.form == "dense":
            return Dense(to_host((torch.randn(n, k, generator=random) / 8).to(kind.scales)))
        width = k if kind.form == "w8" else k // 2
        codes = torch.randint(0, 256, (n, width), dtype=U8, generator=random)
        codes[0, :8] = torch.tensor([0, 255, 1, 254, 127, 128, 15, 240], dtype=U8)
        packed = to_host(codes), to_host(scales.to(kind.scales))
        if kind.form == "lut":
            table = torch.randn(16, generator=random).to(BF16).float()
            return Lut16(kind.group, packed[0], to_host(table), packed[1], (n, k))
        mins = None
        if kind.mins is U8:
            most = 16 if kind.form == "w4" else 256
            mins = torch.randint(0, most, scales.shape, dtype=U8, generator=random)
        elif kind.mins is not None:
            mins = torch.randn(scales.shape, generator=random).to(kind.mins)
        bits = 4 if kind.form == "w4" else 8
        host = None if mins is None else to_host(mins)
        return GroupInt(bits, kind.group, *packed, host, (n, k))

    def weight64(self, form: Form) -> torch.Tensor:
        """The weight in float64 by the formulas of ``forms``."""
        if isinstance(form, Dense):
            return as_tensor(form.w).double()
        n, k = form.shape
        u = as_tensor(form.codes)
        if isinstance(form, Lut16) or form.bits == 4:
            u = torch.stack((u & 15, u >> 4), -1).view(n, k)
        scales = as_tensor(form.scales).double()
        each = scales.repeat_interleave(k // scales.shape[1], 1)
        if isinstance(form, Lut16):
            return each * as_tensor(form.table).double()[u.long()]
        if form.mins is None:
            return each * (u.double() - 2 ** (form.bits - 1))
        mins = as_tensor(form.mins).double()
        if form.mins.dtype.bits == 8:
            mins = -(scales * mins)
        return each * u.double() + mins.repeat_interleave(k // scales.shape[1], 1)

    def inputs(self, m: int, k: int, seed: int = 1) -> torch.Tensor:
        """Activations fp32 [m, k] whose sums are far from zero."""
        return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)) + 0.25

    def prepared(self, x: torch.Tensor) -> Prepared:
        """x [m, K] as prepared inputs; the rows behind m are not numbers."""
        m, k = x.shape
        made = self.poisoned(k)
        made.u[:m, :k] = x.to(BF16)
        for tile in range(made.squares.shape[1]):
            made.squares[:m, tile] = x[:, 64 * tile : 64 * tile + 64].square().sum(1)
        return made

    def poisoned(self, k: int) -> Prepared:
        """Prepared memory full of what is not a number, except behind K."""
        made = Prepared.empty(k, CPU)
        for part in (made.u[:, :k], made.squares):
            part.fill_(float("nan"))
        return made

    def work(self) -> Workspace:
        """A small workspace."""
        return Workspace.empty(CPU, 1 << 20, 1 << 10)

    def poison(self, rows: int, columns: int) -> torch.Tensor:
        """fp32 that is not a number."""
        return torch.full((rows, columns), float("nan"))


@pytest.fixture(scope="session")
def made() -> Made:
    """Inputs of the tests."""
    return Made()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    """One kind after the other."""
    return KINDS[request.param]


@pytest.fixture(scope="session")
def kinds() -> dict[str, Kind]:
    """All kinds by name."""
    return KINDS
