/* R16 blocks times many tokens: prefill, and experts that several tokens chose.
 *
 * A block of 128 threads makes 64 rows x 64 tokens, a thread 4 x 8 of them.  Per group of 128 columns both sides lie in
 * shared memory as words of 4 columns, [32][64]; the next group's loads are under way meanwhile.  A thread sees all
 * columns of its outputs, so the group's integer sum needs no exchange, and the float sum takes a group at a time.
 */
#define TILE_ROWS 64
#define TILE_TOKENS 64

/* Tokens of one tile: jobs [first, first + count) of the sorted list, all with one slab. */
struct Tile {
    int first, count;
};

/* n - 8 of four nibbles in four bytes; the high bit keeps each byte's borrow at home. */
DEVICE u32 signed_nibbles(u32 n) { return ((n | 0x80808080u) - 0x08080808u) ^ 0x80808080u; }

/* y[out][r] = W x[row].  Without tiles, token i of n_tokens is row i of x and of y; with them, jobs say which
 * (gathers, scatters), and w is the offset of the matrix in its slab.  grid (n_blocks / 4, tiles). */
template <int FORMAT>
DEVICE void gemm(const u8 *w, const Tile *tiles, const Job *jobs, int gathers, int scatters, i64 block_bytes,
                 int n_blocks, int rows, const Acts &a, int n_tokens, float *y, i64 y_stride)
{
    __shared__ __align__(16) u32 weights[GROUP / 4][TILE_ROWS];
    __shared__ __align__(16) u32 words[GROUP / 4][TILE_TOKENS];
    __shared__ __align__(16) float weight_scale[TILE_ROWS];
    __shared__ __align__(16) float token_scale[TILE_TOKENS];
    const int LOADS = FORMAT >= I4_ROW ? 2 : 4; /* 16-byte loads of weights a thread and group */
    int first = blockIdx.y * TILE_TOKENS, count = n_tokens - first;
    if (tiles) {
        first = tiles[blockIdx.y].first;
        count = tiles[blockIdx.y].count;
        u64 slab = jobs[first].slab;
        if (!slab)
            return;
        w += slab;
    }
    count = count < TILE_TOKENS ? count : TILE_TOKENS;
    const int tid = threadIdx.x, block0 = blockIdx.x * (TILE_ROWS / BLOCK_ROWS);
    const int header = header_bytes(FORMAT, a.n_groups);

    /* which token this thread fetches (pieces of 16 bytes: tid / 64 + 2 i) */
    int mine = tid % TILE_TOKENS < count ? first + tid % TILE_TOKENS : first;
    int token = jobs && gathers ? jobs[mine].row : mine;

    uint4 next_w[LOADS], next_x[4];
    auto fetch = [&](int g) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int at = tid + 128 * i, per_block = 32 * LOADS; /* 16-byte pieces of a block's group */
            int block = block0 + at / per_block;
            block = block < n_blocks ? block : n_blocks - 1; /* rows past the last repeat it and are not stored */
            next_w[i] = *(const uint4 *)(w + block * block_bytes + header + ((i64)g * per_block + at % per_block) * 16);
        }
        const uint4 *x = (const uint4 *)(a.q + ((i64)g * a.stride + token) * GROUP);
#pragma unroll
        for (int i = 0; i < 4; i++)
            next_x[i] = x[tid / TILE_TOKENS + 2 * i];
    };
    auto store = [&](int g) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int at = tid + 128 * i, per_block = 32 * LOADS;
            int line = at % per_block / 4, row = at / per_block * BLOCK_ROWS + at % 4 * 4;
            uint4 v = next_w[i];
            if (FORMAT >= I4_ROW) {
                uint4 lo, hi;
                lo.x = signed_nibbles(v.x & 0x0f0f0f0f), hi.x = signed_nibbles(v.x >> 4 & 0x0f0f0f0f);
                lo.y = signed_nibbles(v.y & 0x0f0f0f0f), hi.y = signed_nibbles(v.y >> 4 & 0x0f0f0f0f);
                lo.z = signed_nibbles(v.z & 0x0f0f0f0f), hi.z = signed_nibbles(v.z >> 4 & 0x0f0f0f0f);
                lo.w = signed_nibbles(v.w & 0x0f0f0f0f), hi.w = signed_nibbles(v.w >> 4 & 0x0f0f0f0f);
                *(uint4 *)&weights[2 * line][row] = lo;
                *(uint4 *)&weights[2 * line + 1][row] = hi;
            } else
                *(uint4 *)&weights[line][row] = v;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int k = 4 * (tid / TILE_TOKENS + 2 * i);
            words[k][tid % TILE_TOKENS] = next_x[i].x;
            words[k + 1][tid % TILE_TOKENS] = next_x[i].y;
            words[k + 2][tid % TILE_TOKENS] = next_x[i].z;
            words[k + 3][tid % TILE_TOKENS] = next_x[i].w;
        }
        if (tid < TILE_TOKENS)
            token_scale[tid] = a.scale[(i64)g * a.stride + token];
        else if (FORMAT & 1) {
            int row = tid - TILE_TOKENS, block = block0 + row / BLOCK_ROWS;
            block = block < n_blocks ? block : n_blocks - 1;
            weight_scale[row] =
                half_to_float(((const u16 *)(w + block * block_bytes))[g * BLOCK_ROWS + row % BLOCK_ROWS]);
        }
    };

    const int row0 = tid % 16 * 4, token0 = tid / 16 * 8;
    float y_sum[8][4];
#pragma unroll
    for (int t = 0; t < 8; t++)
#pragma unroll
        for (int r = 0; r < 4; r++)
            y_sum[t][r] = 0.0f;
    fetch(0);
    for (int g = 0; g < a.n_groups; g++) {
        __syncthreads(); /* the last group has been used */
        store(g);
        __syncthreads();
        if (g + 1 < a.n_groups)
            fetch(g + 1);
        int dot[8][4];
#pragma unroll
        for (int t = 0; t < 8; t++)
#pragma unroll
            for (int r = 0; r < 4; r++)
                dot[t][r] = 0;
#pragma unroll 4
        for (int k = 0; k < GROUP / 4; k++) {
            int4 v = *(const int4 *)&weights[k][row0];
            int4 lo = *(const int4 *)&words[k][token0], hi = *(const int4 *)&words[k][token0 + 4];
            int x[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
            for (int t = 0; t < 8; t++) {
                dot[t][0] = __dp4a(v.x, x[t], dot[t][0]);
                dot[t][1] = __dp4a(v.y, x[t], dot[t][1]);
                dot[t][2] = __dp4a(v.z, x[t], dot[t][2]);
                dot[t][3] = __dp4a(v.w, x[t], dot[t][3]);
            }
        }
#pragma unroll
        for (int t = 0; t < 8; t++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                float s = token_scale[token0 + t];
                if (FORMAT & 1)
                    s = __fmul_rn(s, weight_scale[row0 + r]);
                y_sum[t][r] = __fadd_rn(y_sum[t][r], __fmul_rn(__int2float_rn(dot[t][r]), s));
            }
    }
    int block = block0 + row0 / BLOCK_ROWS, r0 = blockIdx.x * TILE_ROWS + row0;
    const float *row_scale =
        (const float *)(w + (block < n_blocks ? block : n_blocks - 1) * block_bytes) + row0 % BLOCK_ROWS;
#pragma unroll
    for (int t = 0; t < 8; t++) {
        if (token0 + t >= count)
            break;
        i64 to = jobs && scatters ? jobs[first + token0 + t].out : first + token0 + t;
#pragma unroll
        for (int r = 0; r < 4; r++)
            if (r0 + r < rows)
                y[to * y_stride + r0 + r] = FORMAT & 1 ? y_sum[t][r] : __fmul_rn(y_sum[t][r], row_scale[r]);
    }
}

#define GEMM(FORMAT, NAME)                                                                                             \
    extern "C" __global__ void __launch_bounds__(128)                                                                  \
        gemm_##NAME(const u8 *w, const Tile *tiles, const Job *jobs, int gathers, int scatters, i64 block_bytes,       \
                    int n_blocks, int rows, Acts a, int n_tokens, float *y, i64 y_stride)                              \
    {                                                                                                                  \
        gemm<FORMAT>(w, tiles, jobs, gathers, scatters, block_bytes, n_blocks, rows, a, n_tokens, y, y_stride);        \
    }
GEMM(I8_ROW, i8_row)
GEMM(I8_GROUP, i8_group)
GEMM(I4_ROW, i4_row)
GEMM(I4_GROUP, i4_group)
