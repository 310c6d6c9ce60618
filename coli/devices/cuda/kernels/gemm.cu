/* R16 blocks times many tokens on integer tensor cores: prefill, and experts that several tokens chose.
 *
 * A warp makes 32 rows, two R16 blocks, of TOKENS tokens.  Weights are the A side of mma_s8, activations the B side;
 * rows and columns are permuted so that both sides come from shared memory in 16-byte pieces as they lie in R16: lane
 * l has rows 4(l/4 % 4) .. + 3 of block l/16, and of every 16 lines of 4 columns lines 4(l%4) .. + 3.  Which columns
 * meet in one instruction is free inside a group, as its integer sum is exact; then the group is added in float:
 * ordered.  Half a group of 128 columns is staged at a time, while the next halves are on their way.
 */
#define HALF_GROUP 64

/* Tokens of one tile: jobs [first, first + count) of the sorted list, all with one slab. */
struct Tile {
    int first, count;
};

/* n - 8 of four nibbles in four bytes; the high bit keeps each byte's borrow at home. */
DEVICE u32 signed_nibbles(u32 n) { return ((n | 0x80808080u) - 0x08080808u) ^ 0x80808080u; }

/* Half a group of BLOCKS R16 blocks and TOKENS tokens.  Pieces of weights are exchanged (see weight_at), so that a
 * warp's reads meet no bank twice.  token_scale: in the first half of a group the sums of q, in the second the scales.
 */
template <int FORMAT, int BLOCKS, int TOKENS> struct Stage {
    static const int pieces = FORMAT >= I4_ROW ? 32 : 64; /* 16-byte pieces of half a group in a block */
    uint4 weights[BLOCKS][pieces];
    uint4 words[TOKENS][HALF_GROUP / 16];
    u32 token_scale[TOKENS];
    uint4 row_scale[FORMAT & 1 ? BLOCKS : 1][2]; /* 16 float16 a block */
};

/* Where piece p of a block's half group lies: lanes that differ in l%4 read 4 lines of 4 columns apart. */
template <int FORMAT> DEVICE int weight_at(int p) { return p ^ (p >> (FORMAT >= I4_ROW ? 3 : 4) & 3) << 1; }

/* What a warp multiplies: the sums of its 32 rows and TOKENS tokens.  y[n][t][r]: token 8n + 2 (l%4) + t, row
 * 4 (l/4 % 4) + r of block l/16.  All warps of the block call this.
 * block_of(b): the R16 block b of 2 * warps.   tokens: numbers of the rows of `a`, in shared memory. */
template <int FORMAT, int WARPS, int TOKENS, int STAGES, typename BlockOf>
DEVICE void tile_products(Stage<FORMAT, 2 * WARPS, TOKENS> *stages, BlockOf block_of, const Acts &a, const int *tokens,
                          float (&y)[TOKENS / 8][2][4])
{
    typedef Stage<FORMAT, 2 * WARPS, TOKENS> StageOf;
    const int THREADS = WARP * WARPS, PIECES = StageOf::pieces;
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP;
    const int header = header_bytes(FORMAT, a.n_groups), halves = 2 * a.n_groups;
    const int my_block = 2 * warp + lane / 16, quad = lane / 4 % 4, t = lane % 4;

    auto stage = [&](int half) {
        StageOf &to = stages[half % STAGES];
#pragma unroll
        for (int i = tid; i < 2 * WARPS * PIECES; i += THREADS) {
            int b = i / PIECES, p = i % PIECES;
            copy16(&to.weights[b][weight_at<FORMAT>(p)], block_of(b) + header + ((i64)half * PIECES + p) * 16);
        }
        const int g = half / 2;
#pragma unroll
        for (int i = tid; i < TOKENS * 4; i += THREADS) {
            i64 at = ((i64)g * a.stride + tokens[i / 4]) * GROUP + half % 2 * HALF_GROUP + i % 4 * 16;
            copy16(&to.words[i / 4][i % 4], a.q + at);
        }
        if (tid < TOKENS) {
            i64 at = (i64)g * a.stride + tokens[tid];
            if (half % 2)
                copy4(&to.token_scale[tid], a.scale + at);
            else if (FORMAT >= I4_ROW)
                copy4(&to.token_scale[tid], a.sum + at);
        }
        if (FORMAT & 1 && half % 2 && tid < 4 * WARPS)
            copy16(&to.row_scale[tid / 2][tid % 2], block_of(tid / 2) + g * 32 + tid % 2 * 16);
    };

    int dot[TOKENS / 8][2][4]; /* [8 tokens][rows r, r + 1 of r = 0, 2][mma_s8's c] */
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
        for (int r = 0; r < 4; r++)
            y[n][0][r] = y[n][1][r] = 0.0f;
#pragma unroll
    for (int half = 0; half < STAGES - 1; half++) {
        if (half < halves)
            stage(half);
        copies_end();
    }
    for (int half = 0; half < halves; half++) {
        copies_wait<STAGES - 2>();
        __syncthreads(); /* this half is there, and the one before has been used */
        if (half + STAGES - 1 < halves)
            stage(half + STAGES - 1);
        copies_end();
        const StageOf &now = stages[half % STAGES];
        if (half % 2 == 0) {
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n++) { /* nibbles are 8 too much; their sum gives it back */
                int2 sum = make_int2(0, 0);
                if (FORMAT >= I4_ROW)
                    sum = *(const int2 *)&now.token_scale[8 * n + 2 * t];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    dot[n][r][0] = dot[n][r][2] = -8 * sum.x;
                    dot[n][r][1] = dot[n][r][3] = -8 * sum.y;
                }
            }
        }
        uint4 w[4]; /* lines 4t .. 4t + 3 of rows 4 quad .. + 3 */
        if (FORMAT >= I4_ROW) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint4 v = now.weights[my_block][weight_at<FORMAT>((2 * t + i) * 4 + quad)];
                w[2 * i] = make_uint4(v.x & 0x0f0f0f0f, v.y & 0x0f0f0f0f, v.z & 0x0f0f0f0f, v.w & 0x0f0f0f0f);
                w[2 * i + 1] = make_uint4(v.x >> 4 & 0x0f0f0f0f, v.y >> 4 & 0x0f0f0f0f, v.z >> 4 & 0x0f0f0f0f,
                                          v.w >> 4 & 0x0f0f0f0f);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                w[i] = now.weights[my_block][weight_at<FORMAT>((4 * t + i) * 4 + quad)];
        }
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++) {
            uint4 x = now.words[8 * n + lane / 4][t];
            mma_s8(dot[n][0], w[0].x, w[0].y, w[1].x, w[1].y, x.x, x.y);
            mma_s8(dot[n][1], w[0].z, w[0].w, w[1].z, w[1].w, x.x, x.y);
            mma_s8(dot[n][0], w[2].x, w[2].y, w[3].x, w[3].y, x.z, x.w);
            mma_s8(dot[n][1], w[2].z, w[2].w, w[3].z, w[3].w, x.z, x.w);
        }
        if (half % 2 == 0)
            continue;
        float by[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        if (FORMAT & 1) {
            uint2 h = ((const uint2 *)now.row_scale[my_block])[quad];
            by[0] = half_to_float(h.x & 0xffff), by[1] = half_to_float(h.x >> 16);
            by[2] = half_to_float(h.y & 0xffff), by[3] = half_to_float(h.y >> 16);
        }
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++) {
            float2 s = *(const float2 *)&now.token_scale[8 * n + 2 * t];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                float s0 = FORMAT & 1 ? __fmul_rn(s.x, by[r]) : s.x, s1 = FORMAT & 1 ? __fmul_rn(s.y, by[r]) : s.y;
                const int *d = &dot[n][r / 2][r % 2 * 2];
                y[n][0][r] = __fadd_rn(y[n][0][r], __fmul_rn(__int2float_rn(d[0]), s0));
                y[n][1][r] = __fadd_rn(y[n][1][r], __fmul_rn(__int2float_rn(d[1]), s1));
            }
        }
    }
    if (!(FORMAT & 1)) {
        float4 by = ((const float4 *)block_of(my_block))[quad];
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                y[n][i][0] = __fmul_rn(y[n][i][0], by.x);
                y[n][i][1] = __fmul_rn(y[n][i][1], by.y);
                y[n][i][2] = __fmul_rn(y[n][i][2], by.z);
                y[n][i][3] = __fmul_rn(y[n][i][3], by.w);
            }
    }
}

/* Which jobs a block of threads takes: a tile of the list, or without one the blockIdx.y-th TOKENS tokens.  False where
 * there are none.  slab: what the weights' address counts from. */
template <int TOKENS> DEVICE bool find_jobs(const Tile *tiles, const Job *jobs, int n_tokens, Tile *tile, u64 *slab)
{
    *slab = 0;
    if (tiles) {
        *tile = tiles[blockIdx.y];
        if (tile->count > 0)
            *slab = jobs[tile->first].slab;
        return tile->count > 0 && *slab;
    }
    tile->first = blockIdx.y * TOKENS;
    tile->count = n_tokens - tile->first < TOKENS ? n_tokens - tile->first : TOKENS;
    return tile->count > 0;
}

#define STAGES_OF(FORMAT, WARPS, TOKENS) (3 * sizeof(Stage<FORMAT, 2 * WARPS, TOKENS>) <= 48000 ? 3 : 2)

/* y[out][r] = W x[row].  Without tiles, token i of n_tokens is row i of x and of y; with them, jobs say which
 * (gathers, scatters), and w is the offset of the matrix in its slab.  grid (n_blocks / 8, tiles), 4 warps. */
template <int FORMAT, int TOKENS>
DEVICE void gemm(const u8 *w, const Tile *tiles, const Job *jobs, int gathers, int scatters, i64 block_bytes,
                 int n_blocks, int rows, const Acts &a, int n_tokens, float *y, i64 y_stride)
{
    const int STAGES = STAGES_OF(FORMAT, 4, TOKENS);
    __shared__ __align__(16) Stage<FORMAT, 8, TOKENS> stages[STAGES];
    __shared__ int tokens[TOKENS];
    wait_for_previous();
    let_next_start();
    Tile tile;
    u64 slab;
    if (!find_jobs<TOKENS>(tiles, jobs, n_tokens, &tile, &slab))
        return;
    if (threadIdx.x < TOKENS) { /* those past the last repeat it and are not stored */
        int at = tile.first + (threadIdx.x < tile.count ? threadIdx.x : tile.count - 1);
        tokens[threadIdx.x] = tiles && gathers ? jobs[at].row : at;
    }
    __syncthreads();
    const u8 *first = w + slab;
    const int block0 = blockIdx.x * 8;
    auto block_of = [&](int b) { /* the same for rows */
        return first + (block0 + b < n_blocks ? block0 + b : n_blocks - 1) * block_bytes;
    };
    float sums[TOKENS / 8][2][4];
    tile_products<FORMAT, 4, TOKENS, STAGES>(stages, block_of, a, tokens, sums);
    int lane = threadIdx.x % WARP, r0 = (block0 + threadIdx.x / 16) * BLOCK_ROWS + lane / 4 % 4 * 4;
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int token = 8 * n + 2 * (lane % 4) + i;
            if (token >= tile.count)
                continue;
            i64 to = tiles && scatters ? jobs[tile.first + token].out : tile.first + token;
            float *out = y + to * y_stride + r0;
            if (r0 + 3 < rows && y_stride % 4 == 0)
                *(float4 *)out = make_float4(sums[n][i][0], sums[n][i][1], sums[n][i][2], sums[n][i][3]);
            else
#pragma unroll
                for (int r = 0; r < 4; r++)
                    if (r0 + r < rows)
                        out[r] = sums[n][i][r];
        }
}

/* h[job] = silu(gate x) * up x of the jobs of a tile, quantised.  grid (groups of 128 rows of h, tiles), 8 warps: a
 * warp takes 16 rows of gate and the same of up.  Without tiles the slab is at `slab_at`, and token i of n_tokens is
 * row i. */
template <int FORMAT, int TOKENS>
DEVICE void gate_up_tiles(u64 slab_at, const Tile *tiles, const Job *jobs, i64 gate_offset, i64 up_offset,
                          i64 block_bytes, int n_blocks, int dim, const Acts &a, int n_tokens, const Acts &h)
{
    const int STAGES = STAGES_OF(FORMAT, 8, TOKENS), ROW = GROUP + 4;
    __shared__ __align__(16) Stage<FORMAT, 16, TOKENS> stages[STAGES];
    __shared__ int tokens[TOKENS];
    static_assert(sizeof(stages) >= TOKENS * ROW * sizeof(float), "h takes the place of the stages");
    wait_for_previous();
    let_next_start();
    Tile tile;
    u64 slab;
    if (!find_jobs<TOKENS>(tiles, jobs, n_tokens, &tile, &slab))
        return;
    if (threadIdx.x < TOKENS) {
        int at = tile.first + (threadIdx.x < tile.count ? threadIdx.x : tile.count - 1);
        tokens[threadIdx.x] = tiles ? jobs[at].row : at;
    }
    __syncthreads();
    const u8 *gate = (const u8 *)(slab + slab_at) + gate_offset, *up = (const u8 *)(slab + slab_at) + up_offset;
    const int block0 = blockIdx.x * (GROUP / BLOCK_ROWS);
    auto block_of = [&](int b) {
        int block = block0 + b / 2 < n_blocks ? block0 + b / 2 : n_blocks - 1;
        return (b % 2 ? up : gate) + block * block_bytes;
    };
    float y[TOKENS / 8][2][4];
    tile_products<FORMAT, 8, TOKENS, STAGES>(stages, block_of, a, tokens, y);
    __syncthreads(); /* the stages have been used */
    float *rows = (float *)stages;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, is_up = lane / 16, quad = lane / 4 % 4;
    int in_group = warp * BLOCK_ROWS + 4 * quad, r0 = blockIdx.x * GROUP + in_group;
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) { /* a lane and its partner take one token each */
        float v[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float other = __shfl_xor_sync(ALL, is_up ? y[n][0][r] : y[n][1][r], 16);
            float g = is_up ? other : y[n][0][r], u = is_up ? y[n][1][r] : other;
            v[r] = r0 + r < dim ? __fmul_rn(silu_(g), u) : 0.0f;
        }
        *(float4 *)&rows[(8 * n + 2 * (lane % 4) + is_up) * ROW + in_group] = make_float4(v[0], v[1], v[2], v[3]);
    }
    __syncthreads();
    for (int token = warp; token < tile.count; token += 8) {
        float scale;
        int sum;
        u32 q = quantize_group(*(const float4 *)&rows[token * ROW + 4 * lane], &scale, &sum);
        store_group(h, tile.first + token, blockIdx.x, lane, q, scale, sum);
    }
}

#define GEMM(FORMAT, NAME, TOKENS, BLOCKS)                                                                             \
    extern "C" __global__ void __launch_bounds__(128, BLOCKS)                                                          \
        gemm_##NAME##_##TOKENS(const u8 *w, const Tile *tiles, const Job *jobs, int gathers, int scatters,             \
                               i64 block_bytes, int n_blocks, int rows, Acts a, int n_tokens, float *y, i64 y_stride)  \
    {                                                                                                                  \
        gemm<FORMAT, TOKENS>(w, tiles, jobs, gathers, scatters, block_bytes, n_blocks, rows, a, n_tokens, y,           \
                             y_stride);                                                                                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS / 2) gate_up_tiles_##NAME##_##TOKENS(                     \
        u64 slab_at, const Tile *tiles, const Job *jobs, i64 gate_offset, i64 up_offset, i64 block_bytes,              \
        int n_blocks, int dim, Acts a, int n_tokens, Acts h)                                                           \
    {                                                                                                                  \
        gate_up_tiles<FORMAT, TOKENS>(slab_at, tiles, jobs, gate_offset, up_offset, block_bytes, n_blocks, dim, a,     \
                                      n_tokens, h);                                                                    \
    }
#define GEMM_OF(FORMAT, NAME)                                                                                          \
    GEMM(FORMAT, NAME, 16, 4)                                                                                          \
    GEMM(FORMAT, NAME, 64, 2)
GEMM_OF(I8_ROW, i8_row)
GEMM_OF(I8_GROUP, i8_group)
GEMM_OF(I4_ROW, i4_row)
GEMM_OF(I4_GROUP, i4_group)

/* ---- grouping by expert --------------------------------------------------------------------------------------- */

#define GROUPING_EXPERTS 1024

/* What gemm and gate_up_tiles take of n pairs (row, rank): jobs by expert, pair i having row i / top_k and out i, and
 * tiles of up to `tokens` jobs, the rest of the n_tiles empty.  An expert whose slab is 0 is somebody else's; its pairs
 * come to no job.  One block; a thread for each of at most 1024 experts.  The order inside an expert is whatever it
 * comes to: a job's answer does not depend on its neighbours. */
extern "C" __global__ void __launch_bounds__(GROUPING_EXPERTS)
    group_experts(const int *chosen, int n, int top_k, const u64 *slabs, int n_experts, int tokens, int n_tiles,
                  Job *jobs, Tile *tiles)
{
    __shared__ int counts[GROUPING_EXPERTS], next[GROUPING_EXPERTS], warp_jobs[WARP], warp_tiles[WARP], in_use;
    wait_for_previous();
    let_next_start();
    const int e = threadIdx.x, lane = e % WARP, warp = e / WARP;
    u64 slab = e < n_experts ? slabs[e] : 0;
    counts[e] = 0;
    __syncthreads();
    for (int i = e; i < n; i += blockDim.x)
        atomicAdd(&counts[chosen[i]], 1);
    __syncthreads();
    int count = slab ? counts[e] : 0, n_of = (count + tokens - 1) / tokens, jobs_to = count, tiles_to = n_of;
#pragma unroll
    for (int h = 1; h < WARP; h *= 2) { /* up to and including this expert */
        int a = __shfl_up_sync(ALL, jobs_to, h), b = __shfl_up_sync(ALL, tiles_to, h);
        if (lane >= h)
            jobs_to += a, tiles_to += b;
    }
    if (lane == WARP - 1)
        warp_jobs[warp] = jobs_to, warp_tiles[warp] = tiles_to;
    __syncthreads();
    for (int w = 0; w < warp; w++)
        jobs_to += warp_jobs[w], tiles_to += warp_tiles[w];
    int first = jobs_to - count;
    next[e] = slab ? first : -1;
    for (int i = 0; i < n_of; i++) {
        int left = count - i * tokens;
        tiles[tiles_to - n_of + i] = {first + i * tokens, left < tokens ? left : tokens};
    }
    if (e == blockDim.x - 1)
        in_use = tiles_to;
    __syncthreads();
    for (int i = in_use + e; i < n_tiles; i += blockDim.x)
        tiles[i] = {0, 0};
    for (int i = e; i < n; i += blockDim.x) {
        int of = chosen[i];
        if (next[of] >= 0)
            jobs[atomicAdd(&next[of], 1)] = {slabs[of], i / top_k, i};
    }
}
