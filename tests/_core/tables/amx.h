/* The AMX tile instructions in plain C, so that the kernels that use them are compared on a CPU without them
 * (it needs AVX512-VNNI for the rest).  Include before dispatch.c. */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define AMX_EMULATED
#define AMX __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,avx2")))

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#define _tile_loadconfig(c) emulated_loadconfig(c)
#define _tile_release() (emulated.configured = 0)
#define _tile_loadd(t, base, stride) emulated_loadd(t, base, stride)
#define _tile_stored(t, base, stride) emulated_stored(t, base, stride)
#define _tile_zero(t) emulated_zero(t)
#define _tile_dpbssd(c, a, b) emulated_dpbssd(c, a, b)

static struct {
    int configured;
    uint16_t bytes_per_row[8];
    uint8_t rows[8];
    int8_t tile[8][16][64];
} emulated;

/* What would be an exception. */
static inline void require(int holds)
{
    if (!holds)
        abort();
}

static inline void emulated_loadconfig(const void *config)
{
    const uint8_t *c = config;
    require(c[0] == 1 && c[1] == 0);
    for (int i = 2; i < 16; i++)
        require(c[i] == 0);
    for (int t = 0; t < 8; t++) {
        memcpy(&emulated.bytes_per_row[t], c + 16 + 2 * t, 2);
        emulated.rows[t] = c[48 + t];
        require(emulated.bytes_per_row[t] <= 64 && emulated.rows[t] <= 16);
    }
    memset(emulated.tile, 0, sizeof emulated.tile);
    emulated.configured = 1;
}

static inline void emulated_loadd(int t, const void *base, int64_t stride)
{
    require(emulated.configured && emulated.rows[t] > 0);
    memset(emulated.tile[t], 0, sizeof emulated.tile[t]);
    for (int r = 0; r < emulated.rows[t]; r++)
        memcpy(emulated.tile[t][r], (const uint8_t *)base + r * stride, emulated.bytes_per_row[t]);
}

static inline void emulated_stored(int t, void *base, int64_t stride)
{
    require(emulated.configured && emulated.rows[t] > 0);
    for (int r = 0; r < emulated.rows[t]; r++)
        memcpy((uint8_t *)base + r * stride, emulated.tile[t][r], emulated.bytes_per_row[t]);
}

static inline void emulated_zero(int t)
{
    require(emulated.configured);
    memset(emulated.tile[t], 0, sizeof emulated.tile[t]);
}

static inline void emulated_dpbssd(int c, int a, int b)
{
    require(emulated.configured && c != a && c != b && a != b && emulated.rows[c] == emulated.rows[a]);
    require(emulated.bytes_per_row[c] == emulated.bytes_per_row[b]);
    require(emulated.bytes_per_row[a] == 4 * emulated.rows[b]);
    for (int m = 0; m < emulated.rows[c]; m++)
        for (int n = 0; n < emulated.bytes_per_row[c] / 4; n++) {
            int32_t sum;
            memcpy(&sum, &emulated.tile[c][m][4 * n], 4);
            for (int k = 0; k < emulated.bytes_per_row[a]; k++)
                sum += emulated.tile[a][m][k] * emulated.tile[b][k / 4][4 * n + k % 4];
            memcpy(&emulated.tile[c][m][4 * n], &sum, 4);
        }
}
