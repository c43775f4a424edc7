"""Formulas: distances, Fourier transforms and linear algebra."""

from __future__ import annotations

from math import log2, prod

from torchprof.measure.flops.operation import Formula, Operation, bare, broadcast, counts

# Factorizations: counts of LAPACK Working Note 41. FFT: 5·n·log₂n, the count that FFTW uses.


@counts("_cdist_forward")
def _cdist(op: Operation) -> tuple[int, int]:
    first, second = op.shape(0), op.shape(1)
    return 0, 3 * prod(broadcast([first[:-2], second[:-2]])) * first[-2] * second[-2] * first[-1]


@counts("_pdist_forward")
def _pdist(op: Operation) -> tuple[int, int]:
    rows, width = op.shape(0)
    return 0, 3 * rows * (rows - 1) // 2 * width


@counts("_fft_c2c", "_fft_r2c", "_fft_c2r", scalars=True)
def _fft(op: Operation) -> tuple[int, int]:
    shape = list(op.shape(0))
    dims = op.sizes(1, 1)
    kind = bare(op.name)
    if kind == "_fft_c2r":
        shape[dims[-1]] = op.scalar(3)
    points = prod(shape[dim] for dim in dims)
    flops = 5 * prod(shape) * log2(points) if points > 1 else 0
    if kind != "_fft_c2c":
        flops /= 2  # half of the spectrum of a real signal mirrors the other half
    return 0, round(flops) // (2 if op.is_complex else 1)  # the count is in real operations already


def _factorization(cubic: float, batch_at: int = 0) -> Formula:
    def formula(op: Operation) -> tuple[int, int]:
        shape = op.shape(batch_at)
        return 0, round(prod(shape[:-2]) * cubic * shape[-1] ** 3)

    return formula


counts("linalg_cholesky_ex", "cholesky")(_factorization(1 / 3))
counts("_linalg_det", "_linalg_slogdet")(_factorization(2 / 3))
counts("linalg_inv_ex")(_factorization(2))


@counts("linalg_lu_factor_ex")
def _lu(op: Operation) -> tuple[int, int]:
    *batch, rows, columns = op.shape(0)
    short = min(rows, columns)
    products = rows * columns * short - (rows + columns) * short**2 / 2 + short**3 / 3
    return 0, round(2 * prod(batch) * products)


@counts("_linalg_solve_ex")
def _solve(op: Operation) -> tuple[int, int]:
    matrix, right = op.shape(0), op.shape(1)
    columns = right[-1] if len(right) == len(matrix) else 1
    return 0, round(prod(matrix[:-2]) * (2 / 3 * matrix[-1] ** 3 + 2 * matrix[-1] ** 2 * columns))


@counts("linalg_solve_triangular", "triangular_solve")
def _solve_triangular(op: Operation) -> tuple[int, int]:
    matrix, right = (1, 0) if bare(op.name) == "triangular_solve" else (0, 1)
    return 0, op.numel(right) * op.shape(matrix)[-1]


@counts("linalg_cross", "cross")
def _cross(op: Operation) -> tuple[int, int]:
    return 0, 3 * op.broadcast(2)
