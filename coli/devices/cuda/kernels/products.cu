/* R16 blocks times a few tokens: the memory-bound products of decoding.
 *
 * A block of threads takes one block of 16 rows (or the same one of gate and up).  Its warps share the groups of 128
 * columns; a warp reads a group as whole 512-byte pieces, lane l getting line l/4 and rows 4(l%4)..+3, all loads in
 * flight before the first product.  Products (one rounded float a group and row) meet in shared memory, where one
 * thread a row adds them ascending: the contract's order, whatever the number of warps.
 */

template <int FORMAT> struct Pieces {
    static const int n = FORMAT >= I4_ROW ? 2 : 4; /* 512-byte pieces of a group */
};

/* Four sums of a lane (rows 4(l%4)..+3, its line) -> one row a lane, summed over lines.  Exact, so any order will do.
 */
DEVICE int transpose_sum(int a0, int a1, int a2, int a3, int lane)
{
    bool high = lane & 16;
    int b0 = (high ? a2 : a0) + __shfl_xor_sync(ALL, high ? a0 : a2, 16);
    int b1 = (high ? a3 : a1) + __shfl_xor_sync(ALL, high ? a1 : a3, 16);
    bool odd = lane & 8;
    int c = (odd ? b1 : b0) + __shfl_xor_sync(ALL, odd ? b0 : b1, 8);
    return c + __shfl_xor_sync(ALL, c, 4);
}

DEVICE int row_of_lane(int lane) { return 4 * (lane & 3) + 2 * (lane >> 4) + (lane >> 3 & 1); }

/* What a lane needs of one group of activations: the words that meet its lines. */
template <int FORMAT> struct Words {
    int lo[Pieces<FORMAT>::n], hi[Pieces<FORMAT>::n]; /* hi: int4 only, columns 4..7 of a line */
};

template <int FORMAT> DEVICE Words<FORMAT> load_words(const i8 *group, int lane)
{
    Words<FORMAT> x;
#pragma unroll
    for (int i = 0; i < Pieces<FORMAT>::n; i++) {
        if (FORMAT >= I4_ROW) {
            int2 v = ((const int2 *)group)[8 * i + lane / 4];
            x.lo[i] = v.x;
            x.hi[i] = v.y;
        } else
            x.lo[i] = ((const int *)group)[8 * i + lane / 4];
    }
    return x;
}

/* The same out of registers: lane l holds word l of the group. */
template <int FORMAT> DEVICE Words<FORMAT> share_words(u32 q, int lane)
{
    Words<FORMAT> x;
#pragma unroll
    for (int i = 0; i < Pieces<FORMAT>::n; i++) {
        if (FORMAT >= I4_ROW) {
            x.lo[i] = __shfl_sync(ALL, (int)q, 16 * i + lane / 4 * 2);
            x.hi[i] = __shfl_sync(ALL, (int)q, 16 * i + lane / 4 * 2 + 1);
        } else
            x.lo[i] = __shfl_sync(ALL, (int)q, 8 * i + lane / 4);
    }
    return x;
}

/* A lane's share of a group; from: its first 16 bytes of the group that lies GROUP_OFFSET groups earlier. */
template <int FORMAT, int GROUP_OFFSET> DEVICE void load_group(const u8 *from, uint4 (&w)[Pieces<FORMAT>::n])
{
    const int at = GROUP_OFFSET * Pieces<FORMAT>::n * 512;
    w[0] = load_once<at>(from);
    w[1] = load_once<at + 512>(from);
    if (FORMAT < I4_ROW) {
        w[2 % Pieces<FORMAT>::n] = load_once<at + 1024>(from);
        w[3 % Pieces<FORMAT>::n] = load_once<at + 1536>(from);
    }
}

/* The product of one group, for the row that row_of_lane names: one rounded float (times the row's scale later). */
template <int FORMAT>
DEVICE float group_product(const uint4 (&w)[Pieces<FORMAT>::n], const Words<FORMAT> &x, float scale, int sum,
                           float weight_scale, int lane)
{
    int a0 = 0, a1 = 0, a2 = 0, a3 = 0;
#pragma unroll
    for (int i = 0; i < Pieces<FORMAT>::n; i++) {
        if (FORMAT >= I4_ROW) { /* nibbles 0..15; the 8 they are off by comes back through the sum of q */
            a0 = __dp4a((int)(w[i].x & 0x0f0f0f0f), x.lo[i], a0);
            a1 = __dp4a((int)(w[i].y & 0x0f0f0f0f), x.lo[i], a1);
            a2 = __dp4a((int)(w[i].z & 0x0f0f0f0f), x.lo[i], a2);
            a3 = __dp4a((int)(w[i].w & 0x0f0f0f0f), x.lo[i], a3);
            a0 = __dp4a((int)(w[i].x >> 4 & 0x0f0f0f0f), x.hi[i], a0);
            a1 = __dp4a((int)(w[i].y >> 4 & 0x0f0f0f0f), x.hi[i], a1);
            a2 = __dp4a((int)(w[i].z >> 4 & 0x0f0f0f0f), x.hi[i], a2);
            a3 = __dp4a((int)(w[i].w >> 4 & 0x0f0f0f0f), x.hi[i], a3);
        } else {
            a0 = __dp4a((int)w[i].x, x.lo[i], a0);
            a1 = __dp4a((int)w[i].y, x.lo[i], a1);
            a2 = __dp4a((int)w[i].z, x.lo[i], a2);
            a3 = __dp4a((int)w[i].w, x.lo[i], a3);
        }
    }
    int dot = transpose_sum(a0, a1, a2, a3, lane);
    if (FORMAT >= I4_ROW)
        dot -= 8 * sum;
    return __fmul_rn(__int2float_rn(dot), FORMAT & 1 ? __fmul_rn(scale, weight_scale) : scale);
}

/* Products of the groups of one block that fall to this warp (of n_warps), for TOKENS tokens from token0 on:
 * out[(t * n_groups + g) * 16 + row].  Tokens past the last repeat it; nobody reads their products. */
template <int FORMAT, int GROUPS, int TOKENS>
DEVICE void block_products(const u8 *block, const Acts &a, int token0, int n_tokens, int warp, int n_warps, int lane,
                           float *out)
{
    const int n = Pieces<FORMAT>::n;
    const u8 *payload = block + header_bytes(FORMAT, a.n_groups);
    for (int first = warp * GROUPS; first < a.n_groups; first += n_warps * GROUPS) {
        uint4 w[GROUPS][n];
        const u8 *from = payload + first * (n * 512) + lane * 16;
        load_group<FORMAT, 0>(from, w[0]);
        if (GROUPS > 1 && first + 1 < a.n_groups)
            load_group<FORMAT, 1>(from, w[1 % GROUPS]);
        if (GROUPS > 2 && first + 2 < a.n_groups)
            load_group<FORMAT, 2>(from, w[2 % GROUPS]);
        if (GROUPS > 3 && first + 3 < a.n_groups)
            load_group<FORMAT, 3>(from, w[3 % GROUPS]);
        wait_for_previous();
#pragma unroll
        for (int u = 0; u < GROUPS; u++) {
            int g = first + u;
            if (g >= a.n_groups)
                break;
            float weight_scale = 0.0f;
            if (FORMAT & 1)
                weight_scale = half_to_float(((const u16 *)block)[g * BLOCK_ROWS + row_of_lane(lane)]);
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                int token = token0 + t < n_tokens ? token0 + t : n_tokens - 1;
                u32 at = g * a.stride + token; /* 32 bits: the first load waits for all that stands before it */
                Words<FORMAT> x = load_words<FORMAT>(a.q + at * GROUP, lane);
                float p =
                    group_product<FORMAT>(w[u], x, a.scale[at], FORMAT >= I4_ROW ? a.sum[at] : 0, weight_scale, lane);
                if (!(lane & 4))
                    out[(t * a.n_groups + g) * BLOCK_ROWS + row_of_lane(lane)] = p;
            }
        }
    }
}

/* A row's own scale; asked for before the products, since a load behind the barrier would be waited for in full. */
template <int FORMAT> DEVICE float load_row_scale(const u8 *block, int row)
{
    return FORMAT & 1 ? 1.0f : ((const float *)block)[row];
}

/* One row of a block: groups ascending from +0, then the row's scale where there is one. */
template <int FORMAT> DEVICE float add_groups(float row_scale, const float *products, int n_groups, int row)
{
    float y = 0.0f;
#pragma unroll 8
    for (int g = 0; g < n_groups; g++)
        y = __fadd_rn(y, products[g * BLOCK_ROWS + row]);
    return FORMAT & 1 ? y : __fmul_rn(y, row_scale);
}

/* y[t * y_stride + r] = W x_t.  grid (blocks of rows, tiles of TOKENS tokens); shared: TOKENS * n_groups * 16 floats.
 */
template <int FORMAT, int GROUPS, int TOKENS>
DEVICE void gemv(const u8 *w, i64 block_bytes, int rows, const Acts &a, int n_tokens, float *y, i64 y_stride)
{
    extern __shared__ float products[];
    const u8 *block = w + blockIdx.x * block_bytes;
    int token0 = blockIdx.y * TOKENS;
    let_next_start(); /* which waits for this one before it reads an answer */
    float row_scale = load_row_scale<FORMAT>(block, threadIdx.x % BLOCK_ROWS);
    block_products<FORMAT, GROUPS, TOKENS>(block, a, token0, n_tokens, threadIdx.x / WARP, blockDim.x / WARP,
                                           threadIdx.x % WARP, products);
    __syncthreads();
    for (int i = threadIdx.x; i < BLOCK_ROWS * TOKENS; i += blockDim.x) {
        int t = i / BLOCK_ROWS, row = i % BLOCK_ROWS, r = blockIdx.x * BLOCK_ROWS + row;
        if (r < rows && token0 + t < n_tokens)
            y[(token0 + t) * y_stride + r] =
                add_groups<FORMAT>(row_scale, products + t * a.n_groups * BLOCK_ROWS, a.n_groups, row);
    }
}

#define GEMV(NAME, FORMAT, GROUPS, TOKENS, THREADS, BLOCKS)                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                      \
        NAME(const u8 *w, i64 block_bytes, int rows, Acts a, int n_tokens, float *y, i64 y_stride)                     \
    {                                                                                                                  \
        gemv<FORMAT, GROUPS, TOKENS>(w, block_bytes, rows, a, n_tokens, y, y_stride);                                  \
    }
#define GEMV_OF(FORMAT, NAME)                                                                                          \
    GEMV(gemv_##NAME##_1, FORMAT, 1, 1, 1024, 1)                                                                       \
    GEMV(gemv_##NAME##_2, FORMAT, 1, 2, 512, 1)                                                                        \
    GEMV(gemv_##NAME##_4, FORMAT, 1, 4, 512, 1)                                                                        \
    GEMV(gemv_##NAME##_8, FORMAT, 1, 8, 512, 1)
GEMV_OF(I8_ROW, i8_row)
GEMV_OF(I8_GROUP, i8_group)
GEMV_OF(I4_ROW, i4_row)
GEMV_OF(I4_GROUP, i4_group)
/* Very many rows: four groups a warp, so that a block has four warps. */
GEMV(gemv_i8_row_tall, I8_ROW, 4, 1, 128, 5)
GEMV(gemv_i8_group_tall, I8_GROUP, 4, 1, 128, 5)

/* ---- experts -------------------------------------------------------------------------------------------------- */

/* h[job][r] = silu(gate x) * up x.  grid (blocks of rows, jobs); the first half of the warps takes gate, the other up.
 * shared: 2 * n_groups * 16 floats.  A job without a slab is somebody else's. */
template <int FORMAT, int GROUPS>
DEVICE void gate_up(const Job *jobs, i64 gate_offset, i64 up_offset, i64 block_bytes, int dim, const Acts &a,
                    int n_tokens, float *h)
{
    extern __shared__ float products[];
    wait_for_previous(); /* for the job list; then it is final for `down`, too, which may start now */
    let_next_start();
    Job job = jobs[blockIdx.y];
    if (!job.slab)
        return;
    int warp = threadIdx.x / WARP, half = blockDim.x / WARP / 2, is_up = warp >= half;
    const u8 *gate = (const u8 *)job.slab + gate_offset + blockIdx.x * block_bytes;
    const u8 *up = (const u8 *)job.slab + up_offset + blockIdx.x * block_bytes;
    /* in the first warp, lanes 0..15 will add gate's rows and 16..31 up's */
    float row_scale = load_row_scale<FORMAT>(threadIdx.x / BLOCK_ROWS & 1 ? up : gate, threadIdx.x % BLOCK_ROWS);
    block_products<FORMAT, GROUPS, 1>(is_up ? up : gate, a, job.row, n_tokens, is_up ? warp - half : warp, half,
                                      threadIdx.x % WARP, products + is_up * a.n_groups * BLOCK_ROWS);
    __syncthreads();
    if (threadIdx.x >= WARP)
        return;
    is_up = threadIdx.x / BLOCK_ROWS;
    int row = threadIdx.x % BLOCK_ROWS, r = blockIdx.x * BLOCK_ROWS + row;
    float v = add_groups<FORMAT>(row_scale, products + is_up * a.n_groups * BLOCK_ROWS, a.n_groups, row);
    float other = __shfl_down_sync(ALL, v, BLOCK_ROWS);
    if (!is_up && r < dim)
        h[(i64)blockIdx.y * dim + r] = __fmul_rn(silu_(v), other);
}

/* y[job.out][r] = down h[job].  grid (blocks of rows, jobs); a warp quantises the groups of h that it multiplies.
 * shared: n_groups * 16 floats. */
template <int FORMAT>
DEVICE void down(const Job *jobs, i64 offset, i64 block_bytes, int rows, int dim, int n_groups, const float *h,
                 float *y, i64 y_stride)
{
    extern __shared__ float products[];
    const int n = Pieces<FORMAT>::n;
    let_next_start();
    Job job = jobs[blockIdx.y];
    if (!job.slab)
        return;
    const u8 *block = (const u8 *)job.slab + offset + blockIdx.x * block_bytes;
    const u8 *payload = block + header_bytes(FORMAT, n_groups);
    int lane = threadIdx.x % WARP;
    float row_scale = load_row_scale<FORMAT>(block, threadIdx.x % BLOCK_ROWS);
    for (int g = threadIdx.x / WARP; g < n_groups; g += blockDim.x / WARP) {
        uint4 w[n];
        load_group<FORMAT, 0>(payload + g * (n * 512) + lane * 16, w);
        wait_for_previous();
        float weight_scale = 0.0f, scale;
        int sum;
        if (FORMAT & 1)
            weight_scale = half_to_float(((const u16 *)block)[g * BLOCK_ROWS + row_of_lane(lane)]);
        u32 q = quantize_group(load_columns(h + (i64)blockIdx.y * dim, g * GROUP + 4 * lane, dim), &scale, &sum);
        Words<FORMAT> x = share_words<FORMAT>(q, lane);
        float p = group_product<FORMAT>(w, x, scale, sum, weight_scale, lane);
        if (!(lane & 4))
            products[g * BLOCK_ROWS + row_of_lane(lane)] = p;
    }
    __syncthreads();
    int r = blockIdx.x * BLOCK_ROWS + threadIdx.x;
    if (threadIdx.x < BLOCK_ROWS && r < rows)
        y[job.out * y_stride + r] = add_groups<FORMAT>(row_scale, products, n_groups, threadIdx.x);
}

#define EXPERTS(FORMAT, NAME, GROUPS, THREADS)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) gate_up_##NAME(                              \
        const Job *jobs, i64 gate_offset, i64 up_offset, i64 block_bytes, int dim, Acts a, int n_tokens, float *h)     \
    {                                                                                                                  \
        gate_up<FORMAT, GROUPS>(jobs, gate_offset, up_offset, block_bytes, dim, a, n_tokens, h);                       \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(512, 2)                                                               \
        down_##NAME(const Job *jobs, i64 offset, i64 block_bytes, int rows, int dim, int n_groups, const float *h,     \
                    float *y, i64 y_stride)                                                                            \
    {                                                                                                                  \
        down<FORMAT>(jobs, offset, block_bytes, rows, dim, n_groups, h, y, y_stride);                                  \
    }
/* groups a warp and threads a block of gate_up: what 64 registers a thread hold in flight */
EXPERTS(I8_ROW, i8_row, 1, 1024)
EXPERTS(I8_GROUP, i8_group, 1, 1024)
EXPERTS(I4_ROW, i4_row, 2, 512)
EXPERTS(I4_GROUP, i4_group, 2, 512)
