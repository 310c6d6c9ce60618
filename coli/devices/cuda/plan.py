"""Which kernels make a product or an expert group, with which grids: launches on a lane, and nothing waits here.

Launches go to the lane's stream, directly or while a graph is captured; both ways the same kernels run in the same
order, so a graph is only cheaper to start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from coli.container.layout import (
    BLOCK_ROWS,
    FORMATS,
    GROUP,
    MatrixLayout,
    SlabLayout,
    round_up,
)
from coli.devices.base import DeviceError
from coli.devices.cuda.context import Acts
from coli.devices.cuda.lane import Lane

JOB = np.dtype([("slab", "<u8"), ("row", "<i4"), ("out", "<i4")])  # struct Job of contract.cu
TILE = np.dtype([("first", "<i4"), ("count", "<i4")])  # struct Tile of gemm.cu

GEMM_TOKENS = 17  # from here on tiles of 64 tokens beat reading the matrix once per 8
GEMM_JOBS = 4  # the same for experts: jobs an expert on average
TALL_BLOCKS = 4096  # from so many row blocks on, few warps a block and many blocks a multiprocessor read faster
_TILE_BLOCKS, _TILE_TOKENS = 8, (16, 64)  # gemm.cu: 16-row blocks of one thread block, tokens of a tile
JOBS_OF_TILE = _TILE_TOKENS[-1]  # of lists that the host makes
_FEW_TOKENS = 24  # up to so many tokens an expert on average, or in all, small tiles waste less than large ones gain
GROUPED_EXPERTS = 1024  # gemm.cu: experts of a layer that `grouped_experts` takes
_SHARED_BYTES = 48 << 10  # what every card gives a block without being asked


@dataclass(frozen=True)
class Experts:
    """An expert group on its way: n jobs over n_tokens rows of x, in chunks that fit the scratch."""

    jobs: np.ndarray
    tiles: list[np.ndarray] | None
    chunk: int


def acts_at(at: int, n_tokens: int, n_groups: int) -> tuple[Acts, int]:
    """Quantised activations at an address, and the bytes they take."""
    q_bytes = round_up(n_tokens * n_groups * GROUP)
    s_bytes = round_up(n_tokens * n_groups * 4)
    return Acts(at, at + q_bytes, at + q_bytes + s_bytes, n_tokens, n_groups), q_bytes + 2 * s_bytes


def x_stride(layout: MatrixLayout) -> int:
    """Floats between two rows of x in the staging."""
    return -(-layout.cols // 4) * 4  # so that every row is 16-byte aligned


def x_bytes(layout: MatrixLayout, n_tokens: int) -> int:
    """Scratch that n_tokens rows of x take on the card."""
    if FORMATS[layout.format].is_blocks:
        return acts_at(0, n_tokens, layout.n_groups)[1]
    return round_up(4 * n_tokens * x_stride(layout))


def _pull(lane: Lane, layout: MatrixLayout, n_tokens: int, list_at: int, list_bytes: int) -> Acts | int:
    """x from the staging to the scratch, quantised where the format wants it; a job list beside it."""
    words = list_bytes // 4
    if FORMATS[layout.format].is_blocks:
        acts, _ = acts_at(lane.scratch_at, n_tokens, layout.n_groups)
        blocks = -(-n_tokens * layout.n_groups // 4)
        lane.context.launch("pull", "", (blocks, 1), 128, 0, lane.stream, lane.x.address, x_stride(layout), layout.cols,
                            n_tokens, acts, lane.list.address, list_at, words, 0)  # fmt: skip
        return acts
    n = n_tokens * x_stride(layout)
    blocks = min(-(-n // 256), 4 * lane.context.multiprocessors)
    lane.context.launch("pull_float", "", (blocks, 1), 256, 0, lane.stream, lane.x.address, n, lane.scratch_at,
                        lane.list.address, list_at, words)  # fmt: skip
    return lane.scratch_at


def matmul(lane: Lane, weights: int, layout: MatrixLayout, n_tokens: int) -> None:
    """y = W x of n_tokens rows in the staging, then the flag."""
    x = _pull(lane, layout, n_tokens, lane.scratch_at, 0)
    product(lane, weights, layout, n_tokens, x, lane.y.address)
    lane.raise_flag()


def product(lane: Lane, weights: int, layout: MatrixLayout, n_tokens: int, x: Acts | int, y: int) -> None:
    """y (n_tokens, rows) = W x.  x : quantised, or the address of float32 rows `x_stride` apart."""
    launch, y_stride = lane.context.launch, layout.rows
    if not isinstance(x, Acts):
        launch("dense", layout.format, (-(-layout.rows // 8), n_tokens), 256, 0, lane.stream, weights, 0, 0, 0,
               layout.block_bytes, layout.rows, layout.cols, x, x_stride(layout), y, y_stride)  # fmt: skip
        return
    if n_tokens >= GEMM_TOKENS:
        _gemm(lane, layout, weights, x, n_tokens, y, _tile_tokens(n_tokens))
        return
    tokens = _gemv_tokens(layout, n_tokens)
    tall = tokens == 1 and layout.n_blocks >= TALL_BLOCKS and FORMATS[layout.format].bits == 8
    most = 4 if tall else 32 if tokens == 1 else 16  # what the kernels' launch bounds allow
    warps = min(-(-layout.n_groups // (4 if tall else 1)), most)
    shared = tokens * layout.n_groups * BLOCK_ROWS * 4
    launch("gemv", f"{layout.format}_{'tall' if tall else tokens}", (layout.n_blocks, -(-n_tokens // tokens)), 32 *
           warps, shared, lane.stream, weights, layout.block_bytes, layout.rows, x, n_tokens, y, y_stride,
           early=True)  # fmt: skip


def _tile_tokens(tokens: float) -> int:
    """Tokens of a tile where an expert, or a matrix, has so many."""
    return _TILE_TOKENS[tokens > _FEW_TOKENS]


def _gemm(lane: Lane, layout: MatrixLayout, weights: int, x: Acts, n: int, y: int, tokens: int, tiles: int = 0,
          tiles_at: int = 0, jobs_at: int = 0) -> None:  # fmt: skip
    """y[out] = W x of n rows, or of the jobs of a number of tiles in their order, whose slab W is then an offset of."""
    grid = -(-layout.n_blocks // _TILE_BLOCKS), tiles or -(-n // tokens)
    lane.context.launch("gemm", f"{layout.format}_{tokens}", grid, 128, 0, lane.stream, weights, tiles_at, jobs_at, 0,
                        int(tiles > 0), layout.block_bytes, layout.n_blocks, layout.rows, x, n, y, layout.rows,
                        early=True)  # fmt: skip


def _gate_up(lane: Lane, slab: SlabLayout, slab_at: int, x: Acts, n: int, h: Acts, tokens: int, tiles: int = 0,
             tiles_at: int = 0, jobs_at: int = 0) -> None:  # fmt: skip
    """h = silu(gate x) * up x, quantised: of n rows and one slab, or of jobs as in `_gemm`."""
    lane.context.launch("gate_up_tiles", f"{slab.format}_{tokens}", (h.n_groups, tiles or -(-n // tokens)), 256, 0,
                        lane.stream, slab_at, tiles_at, jobs_at, slab.gate_offset, slab.up_offset,
                        slab.gate.block_bytes, slab.gate.n_blocks, slab.intermediate_size, x, n, h,
                        early=True)  # fmt: skip


def _gemv_tokens(layout: MatrixLayout, n_tokens: int) -> int:
    """Tokens that one block takes at once: 1, 2, 4 or 8, whose products must fit a block's shared memory."""
    tokens = next(t for t in (1, 2, 4, 8) if t >= min(n_tokens, 8))
    while tokens > 1 and tokens * layout.n_groups * BLOCK_ROWS * 4 > _SHARED_BYTES:
        tokens //= 2
    if layout.n_groups * BLOCK_ROWS * 4 > _SHARED_BYTES:
        raise DeviceError(
            f"a matrix with {layout.cols} columns: the kernels take {_SHARED_BYTES // 64 * GROUP}", "launch"
        )
    return tokens


# ---- experts ------------------------------------------------------------------------------------------------


def plan_experts(lane: Lane, slab: SlabLayout, jobs: np.ndarray, n_tokens: int) -> Experts:
    """How a group is cut.  jobs : JOB (n,), in the caller's order.

    Raises DeviceError("out of memory") where not even one job fits the scratch.
    """
    n = len(jobs)
    blocks = FORMATS[slab.format].is_blocks
    many = blocks and n > GEMM_JOBS and n >= GEMM_JOBS * len(np.unique(jobs["slab"]))
    if many:
        jobs = jobs[np.argsort(jobs["slab"], kind="stable")]
    left = lane.scratch_bytes - x_bytes(slab.gate, n_tokens) - _list_bytes(n) - 4096
    chunk = min(n, max(0, left) // _job_bytes(slab, many))
    if chunk < 1:
        raise DeviceError(f"{n_tokens} rows do not fit the {lane.scratch_bytes:,} bytes of scratch", "out of memory")
    if not many:
        return Experts(jobs, None, min(chunk, 32768))  # jobs are a grid's second dimension
    return Experts(jobs, [_tiles(jobs["slab"][at : at + chunk]) for at in range(0, n, chunk)], chunk)


def _job_bytes(slab: SlabLayout, many: bool) -> int:
    """Scratch of one job: gate and up as they are, or in a batch h quantised."""
    return slab.down.n_groups * (GROUP + 8) + 64 if many else 8 * slab.intermediate_size


def _list_bytes(n: int) -> int:
    return round_up(n * (JOB.itemsize + TILE.itemsize))


def _tiles(slabs: np.ndarray) -> np.ndarray:
    """Runs of equal slabs in pieces of as many jobs as a large tile has: TILE (tiles,)."""
    starts = np.flatnonzero(np.concatenate(([True], slabs[1:] != slabs[:-1])))
    ends = np.append(starts[1:], len(slabs))
    tiles = [
        (at, min(JOBS_OF_TILE, end - at))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        for at in range(start, end, JOBS_OF_TILE)
    ]
    return np.array(tiles, TILE)


def put_list(lane: Lane, plan: Experts) -> None:
    """The job list, and the tiles behind it, into the staging."""
    at = 0
    for part in (plan.jobs, *(plan.tiles or ())):
        raw = part.view(np.uint8)
        lane.list.array[at : at + raw.size] = raw
        at += raw.size


def list_bytes(plan: Experts) -> int:
    """Bytes of the job list and the tiles."""
    return plan.jobs.nbytes + sum(tiles.nbytes for tiles in plan.tiles or ())


def experts(lane: Lane, slab: SlabLayout, plan: Experts, n_tokens: int) -> None:
    """y[out] = down(silu(gate x) * up x) of every job, then the flag."""
    x_size = x_bytes(slab.gate, n_tokens)
    list_at = lane.scratch_at + x_size
    x = _pull(lane, slab.gate, n_tokens, list_at, list_bytes(plan))
    work_at = list_at + _list_bytes(len(plan.jobs))
    tiles_at = list_at + plan.jobs.nbytes
    for number, at in enumerate(range(0, len(plan.jobs), plan.chunk)):
        n = min(plan.chunk, len(plan.jobs) - at)
        jobs_at = list_at + at * JOB.itemsize
        if not isinstance(x, Acts):
            _float_jobs(lane, slab, jobs_at, n, x, work_at)
        elif plan.tiles is None:
            _few_jobs(lane, slab, jobs_at, n, n_tokens, x, work_at)
        else:
            tiles = plan.tiles[number]
            many_jobs(lane, slab, jobs_at, n, tiles_at, len(tiles), x, work_at, lane.y.address)
            tiles_at += tiles.nbytes
    lane.raise_flag()


def _few_jobs(lane: Lane, slab: SlabLayout, jobs_at: int, n: int, n_tokens: int, x: Acts, h_at: int) -> None:
    """A job a column of the grid: each reads its expert's weights once, from memory or from the cache."""
    launch, gate, down, dim = lane.context.launch, slab.gate, slab.down, slab.intermediate_size
    shared = 2 * gate.n_groups * BLOCK_ROWS * 4, down.n_groups * BLOCK_ROWS * 4
    if max(shared) > _SHARED_BYTES:
        raise DeviceError(
            f"experts of {slab.hidden_size} x {dim}: products do not fit a block's shared memory", "launch"
        )
    warps = 2 * min(8 if gate_groups(slab.format) == 2 else 16, -(-gate.n_groups // gate_groups(slab.format)))
    launch("gate_up", slab.format, (gate.n_blocks, n), 32 * warps, shared[0], lane.stream, jobs_at, slab.gate_offset,
           slab.up_offset, gate.block_bytes, dim, x, n_tokens, h_at, early=True)  # fmt: skip
    launch("down", slab.format, (down.n_blocks, n), 32 * min(16, down.n_groups), shared[1], lane.stream, jobs_at,
           slab.down_offset, down.block_bytes, down.rows, dim, down.n_groups, h_at, lane.y.address, down.rows,
           early=True)  # fmt: skip


def gate_groups(format: str) -> int:
    """Groups that a warp of gate_up takes at once (products.cu, EXPERTS)."""
    return 2 if FORMATS[format].bits == 4 else 1


def many_jobs(
    lane: Lane, slab: SlabLayout, jobs_at: int, n: int, tiles_at: int, n_tiles: int, x: Acts, h_at: int, y: int
) -> None:
    """y[out] = the experts of n jobs, in tiles of at most JOBS_OF_TILE that share an expert.

    h_at : scratch, as large as `acts_at` says of n rows and the down matrix' groups.
    lane : any holder of a context and a stream.
    """
    h, _ = acts_at(h_at, n, slab.down.n_groups)
    _gate_up(lane, slab, 0, x, n, h, JOBS_OF_TILE, n_tiles, tiles_at, jobs_at)
    _gemm(lane, slab.down, slab.down_offset, h, n, y, JOBS_OF_TILE, n_tiles, tiles_at, jobs_at)


def grouped_experts(lane: Lane, slab: SlabLayout, n_rows: int, top_k: int, n_experts: int, chosen_at: int,
                    slabs_at: int, x: Acts, take: Callable[[int], int], y: int) -> None:  # fmt: skip
    """y[row * top_k + rank] = the experts of many rows, read once for all tokens that chose them.

    chosen_at : int32 (n_rows, top_k), numbers of experts.   slabs_at : uint64 (n_experts,), where they lie; pairs whose
    expert has 0 there are left out.   take : scratch by its bytes.   lane : any holder of a context and a stream.
    """
    n = n_rows * top_k
    tokens = _tile_tokens(n / n_experts)
    n_tiles = n // tokens + min(n, n_experts)
    jobs_at, tiles_at = take(n * JOB.itemsize), take(n_tiles * TILE.itemsize)
    h, h_bytes = acts_at(0, n, slab.down.n_groups)
    h, _ = acts_at(take(h_bytes), n, slab.down.n_groups)
    lane.context.launch("group_experts", "", (1, 1), GROUPED_EXPERTS, 0, lane.stream, chosen_at, n, top_k, slabs_at,
                        n_experts, tokens, n_tiles, jobs_at, tiles_at, early=True)  # fmt: skip
    _gate_up(lane, slab, 0, x, n_rows, h, tokens, n_tiles, tiles_at, jobs_at)
    _gemm(lane, slab.down, slab.down_offset, h, n, y, tokens, n_tiles, tiles_at, jobs_at)


def expert_of_rows(
    lane: Lane, slab: SlabLayout, slab_at: int, n_rows: int, x: Acts, take: Callable[[int], int], y: int
) -> None:
    """y (n_rows, hidden) = one expert, the shared one, applied to many rows."""
    h, h_bytes = acts_at(0, n_rows, slab.down.n_groups)
    h, _ = acts_at(take(h_bytes), n_rows, slab.down.n_groups)
    tokens = _tile_tokens(n_rows)
    _gate_up(lane, slab, slab_at, x, n_rows, h, tokens)
    _gemm(lane, slab.down, slab_at + slab.down_offset, h, n_rows, y, tokens)


def _float_jobs(lane: Lane, slab: SlabLayout, jobs_at: int, n: int, x: int, work_at: int) -> None:
    """Row-major experts: nothing is quantised."""
    launch, gate, down, dim = lane.context.launch, slab.gate, slab.down, slab.intermediate_size
    up_at = work_at + 4 * n * dim
    for offset, to in ((slab.gate_offset, work_at), (slab.up_offset, up_at)):
        launch("dense", slab.format, (-(-dim // 8), n), 256, 0, lane.stream, offset, jobs_at, 1, 0, gate.block_bytes,
               dim, gate.cols, x, x_stride(gate), to, dim)  # fmt: skip
    launch("silu_mul", "", (-(-n * dim // 256), 1), 256, 0, lane.stream, work_at, up_at, n * dim)
    launch("dense", slab.format, (-(-down.rows // 8), n), 256, 0, lane.stream, slab.down_offset, jobs_at, 0, 1,
           down.block_bytes, down.rows, dim, work_at, dim, lane.y.address, down.rows)  # fmt: skip
