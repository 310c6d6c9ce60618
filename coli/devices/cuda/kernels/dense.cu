/* Row-major float32, bfloat16 and float16 matrices: activations as they are, the 32-lane dot of a warp a row. */

template <int FORMAT> DEVICE float widen(const u8 *row, int i)
{
    if (FORMAT == F32)
        return ((const float *)row)[i];
    u16 h = ((const u16 *)row)[i];
    return FORMAT == BF16 ? __uint_as_float((u32)h << 16) : half_to_float(h);
}

/* y[out][r] = W x[row] for n jobs; without jobs the i-th row of x and y.  grid (rows / 8, n), 8 warps. */
template <int FORMAT>
DEVICE void dense(const u8 *w, const Job *jobs, int gathers, int scatters, i64 row_bytes, int rows, int cols,
                  const float *x, i64 x_stride, float *y, i64 y_stride)
{
    i64 from = blockIdx.y, to = blockIdx.y;
    if (jobs) {
        Job job = jobs[blockIdx.y];
        if (!job.slab)
            return;
        w += job.slab; /* w is the offset of the part in its slab */
        from = gathers ? job.row : from;
        to = scatters ? job.out : to;
    }
    int r = blockIdx.x * 8 + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (r >= rows)
        return;
    const u8 *row = w + r * row_bytes;
    const float *of = x + from * x_stride;
    const int AHEAD = 16; /* columns of a lane that are under way at once */
    float p = 0.0f;
    int i = lane;
    for (; i + WARP * (AHEAD - 1) < cols; i += WARP * AHEAD) {
        float a[AHEAD], b[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            a[j] = widen<FORMAT>(row, i + WARP * j);
            b[j] = of[i + WARP * j];
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            p = __fadd_rn(p, __fmul_rn(a[j], b[j]));
    }
    for (; i < cols; i += WARP)
        p = __fadd_rn(p, __fmul_rn(widen<FORMAT>(row, i), of[i]));
    p = tree32(p);
    if (lane == 0)
        y[to * y_stride + r] = p;
}

#define DENSE(FORMAT, NAME)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        dense_##NAME(const u8 *w, const Job *jobs, int gathers, int scatters, i64 row_bytes, int rows, int cols,       \
                     const float *x, i64 x_stride, float *y, i64 y_stride)                                             \
    {                                                                                                                  \
        dense<FORMAT>(w, jobs, gathers, scatters, row_bytes, rows, cols, x, x_stride, y, y_stride);                    \
    }
DENSE(F32, f32)
DENSE(BF16, bf16)
DENSE(F16, f16)
