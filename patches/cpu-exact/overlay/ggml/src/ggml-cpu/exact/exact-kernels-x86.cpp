// Dot products of several columns at a time, for x86 with AVX-512 VNNI. Each kernel unpacks a weight once for all
// columns and keeps, column by column, the float operations of stock's one-column kernel (arch/x86/quants.c,
// arch/x86/repack.cpp, vec.cpp). Between two float operations there are only integer sums, which are exact in any
// order, and those are done here as is cheapest.

// first: the C declarations of the blocks, whose fields have plain names
#define GGML_COMMON_DECL_C
#include "ggml-common.h"

#include "exact-kernels.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "repack.h"
#include "simd-mappings.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__AVX512VNNI__) && \
    defined(__FMA__) && defined(__F16C__) && defined(__GNUC__)
#define EXACT_VNNI
#endif

#if defined(EXACT_VNNI)

#include <immintrin.h>

namespace {

// Calls f(first column, std::integral_constant<columns>) for tiles of up to MAX columns, as equal in size as can be
template <int MAX, typename F> void tiles_of_columns(int n_cols, F && f) {
    const int n_tiles = (n_cols + MAX - 1) / MAX;
    int       c       = 0;
    for (int t = 0; t < n_tiles; t++) {
        const int n = (n_cols - c + n_tiles - t - 1) / (n_tiles - t);
        switch (n) {
            case 1: f(c, std::integral_constant<int, 1>()); break;
            case 2: f(c, std::integral_constant<int, 2>()); break;
            case 3: if constexpr (MAX >= 3) { f(c, std::integral_constant<int, 3>()); } break;
            case 4: if constexpr (MAX >= 4) { f(c, std::integral_constant<int, 4>()); } break;
            case 5: if constexpr (MAX >= 5) { f(c, std::integral_constant<int, 5>()); } break;
            case 6: if constexpr (MAX >= 6) { f(c, std::integral_constant<int, 6>()); } break;
            case 7: if constexpr (MAX >= 7) { f(c, std::integral_constant<int, 7>()); } break;
            case 8: if constexpr (MAX >= 8) { f(c, std::integral_constant<int, 8>()); } break;
            default: GGML_ABORT("cpu-exact: no tile of %d columns", n);
        }
        c += n;
    }
}

// The sum of eight lanes in the order of hsum_float_8: halves, then pairs at distance two, then the last two
inline float sum_lanes(__m256 x) {
    __m128 s = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
    s        = _mm_add_ps(s, _mm_movehl_ps(s, s));
    s        = _mm_add_ss(s, _mm_movehdup_ps(s));
    return _mm_cvtss_f32(s);
}

// ---- blocks of 32: Q4_0, Q5_0, Q8_0 against Q8_0, Q4_1 against Q8_1 ----
//
// Order kept: per block, d = d_x*d_y, eight lanes of the sums of four neighbouring products, acc = fma(d, sums, acc);
// for Q4_1 besides summs = fma(m_x, s_y, summs) in scalar; at the end the lanes are summed, then summs is added.

struct weights_q8_0 {
    using block = block_q8_0;
    using col   = block_q8_0;
    static constexpr bool HAS_MIN = false;
    static __m256i load(const block & b) { return _mm256_loadu_si256((const __m256i *) b.qs); }
};

// 32 nibbles as bytes: the low ones, then the high ones
inline __m256i nibbles(const uint8_t * qs) {
    const __m128i raw = _mm_loadu_si128((const __m128i *) qs);
    return _mm256_and_si256(_mm256_set1_epi8(15), _mm256_inserti128_si256(_mm256_castsi128_si256(raw), _mm_srli_epi16(raw, 4), 1));
}

struct weights_q4_0 {
    using block = block_q4_0;
    using col   = block_q8_0;
    static constexpr bool HAS_MIN = false;
    static __m256i load(const block & b) { return _mm256_sub_epi8(nibbles(b.qs), _mm256_set1_epi8(8)); }
};

struct weights_q5_0 {
    using block = block_q5_0;
    using col   = block_q8_0;
    static constexpr bool HAS_MIN = false;
    static __m256i load(const block & b) {
        uint32_t high;
        memcpy(&high, b.qh, sizeof(high));
        // q - 16 in two's complement: 0xF0 is set where the fifth bit is not
        return _mm256_or_si256(nibbles(b.qs), _mm256_maskz_set1_epi8((__mmask32) ~high, (char) 0xF0));
    }
};

struct weights_q4_1 {
    using block = block_q4_1;
    using col   = block_q8_1;
    static constexpr bool HAS_MIN = true;
    static __m256i load(const block & b) { return nibbles(b.qs); }
};

// The scales of the columns as floats, a column after the other; for Q4_1 those of the sums follow
template <typename W> struct col_scales {
    std::vector<float> values;

    const float * fill(int64_t nb, const char * const * cols, int n_cols) {
        const size_t n = (size_t) (n_cols * nb);
        if (values.size() < 2 * n) {
            values.resize(2 * n);
        }
        for (int c = 0; c < n_cols; c++) {
            const typename W::col * y = (const typename W::col *) cols[c];
            for (int64_t b = 0; b < nb; b++) {
                values[c * nb + b] = _cvtsh_ss(y[b].d);
                if constexpr (W::HAS_MIN) {
                    values[n + c * nb + b] = _cvtsh_ss(y[b].s);
                }
            }
        }
        return values.data();
    }
};

// Four halves, one of each row, as floats
inline __m128 widen(const ggml_half (&h)[4]) {
    uint64_t all;
    memcpy(&all, h, sizeof(all));
    return _mm_cvtph_ps(_mm_cvtsi64_si128((long long) all));
}

template <int I> inline __m256 lane_of_halves(__m256 x) {
    return _mm256_shuffle_ps(x, x, I * 0x55);
}

// R rows (1 or 4) against C columns
template <typename W, int R, int C>
inline void blocks_tile(int64_t nb, const char * rows, size_t row_stride, const char * const * cols, const float * dy, const float * sy,
                        float * const * outs, int64_t r0) {
    static_assert(R == 1 || R == 4, "a lane of a half register a row");
    const typename W::block * x[R];
    const typename W::col *   y[C];
    __m256                    acc[R][C];
    [[maybe_unused]] __m128   summs[C];  // a lane a row
    for (int r = 0; r < R; r++) {
        x[r] = (const typename W::block *) (rows + (r0 + r) * row_stride);
        for (int c = 0; c < C; c++) {
            acc[r][c] = _mm256_setzero_ps();
        }
    }
    for (int c = 0; c < C; c++) {
        y[c]     = (const typename W::col *) cols[c];
        summs[c] = _mm_setzero_ps();
    }

    [[maybe_unused]] const char * ahead = rows + (r0 + R) * row_stride;

    const __m256i sign = _mm256_set1_epi8((char) 0x80);
    for (int64_t b = 0; b < nb; b++) {
        __m256i   w[R];
        __m256i   first[R];  // what the integer sums start from
        ggml_half d[4] = {};
        ggml_half m[4] = {};
        for (int r = 0; r < R; r++) {
            w[r] = W::load(x[r][b]);
            d[r] = x[r][b].d;
            if constexpr (W::HAS_MIN) {
                m[r]     = x[r][b].m;
                first[r] = _mm256_setzero_si256();
            } else {
                // The signed columns are raised by 128 to suit the unsigned side of the instruction; 128 times the
                // weights is taken off again here. Q4_1 has unsigned weights and needs neither
                first[r] = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_dpbusd_epi32(_mm256_setzero_si256(), sign, w[r]));
            }
        }
        if constexpr (R == 4) {
            // Rows are short, so the hardware hardly notices that they follow each other: ask for the next four
            const char * next = ahead + b * 4 * sizeof(typename W::block);
            _mm_prefetch(next, _MM_HINT_T0);
            _mm_prefetch(next + 64, _MM_HINT_T0);
            if constexpr (4 * sizeof(typename W::block) > 128) {
                _mm_prefetch(next + 128, _MM_HINT_T0);
            }
        }
        const __m256 dx = _mm256_broadcast_f32x4(widen(d));
        for (int c = 0; c < C; c++) {
            const __m256i q     = _mm256_loadu_si256((const __m256i *) y[c][b].qs);
            const __m256i qu    = W::HAS_MIN ? q : _mm256_xor_si256(q, sign);
            const __m256  scale = _mm256_mul_ps(dx, _mm256_set1_ps(dy[c * nb + b]));  // a row a lane, in both halves
            const auto    sums  = [&](int r) {
                return _mm256_cvtepi32_ps(W::HAS_MIN ? _mm256_dpbusd_epi32(first[r], w[r], q) : _mm256_dpbusd_epi32(first[r], qu, w[r]));
            };
            acc[0][c] = _mm256_fmadd_ps(lane_of_halves<0>(scale), sums(0), acc[0][c]);
            if constexpr (R == 4) {
                acc[1][c] = _mm256_fmadd_ps(lane_of_halves<1>(scale), sums(1), acc[1][c]);
                acc[2][c] = _mm256_fmadd_ps(lane_of_halves<2>(scale), sums(2), acc[2][c]);
                acc[3][c] = _mm256_fmadd_ps(lane_of_halves<3>(scale), sums(3), acc[3][c]);
            }
            if constexpr (W::HAS_MIN) {
                summs[c] = _mm_fmadd_ps(widen(m), _mm_set1_ps(sy[c * nb + b]), summs[c]);
            }
        }
    }
    for (int c = 0; c < C; c++) {
        alignas(16) float sum_of_mins[4];
        _mm_store_ps(sum_of_mins, summs[c]);
        for (int r = 0; r < R; r++) {
            float sum = sum_lanes(acc[r][c]);
            if constexpr (W::HAS_MIN) {
                sum += sum_of_mins[r];
            }
            outs[c][r0 + r] = sum;
        }
    }
}

template <typename W>
void blocks_dot(ggml_vec_dot_t, int64_t k, const char * rows, size_t row_stride, int64_t n_rows, const char * const * cols,
                float * const * outs, int n_cols) {
    static thread_local col_scales<W> scales;
    const int64_t nb = k / 32;
    const float * dy = scales.fill(nb, cols, n_cols);
    const float * sy = dy + n_cols * nb;
    int64_t       r  = 0;
    for (; r + 4 <= n_rows; r += 4) {
        tiles_of_columns<W::HAS_MIN ? 3 : 4>(n_cols, [&](int c, auto n) {
            blocks_tile<W, 4, n.value>(nb, rows, row_stride, cols + c, dy + c * nb, sy + c * nb, outs + c, r);
        });
    }
    for (; r < n_rows; r++) {
        tiles_of_columns<4>(n_cols, [&](int c, auto n) {
            blocks_tile<W, 1, n.value>(nb, rows, row_stride, cols + c, dy + c * nb, sy + c * nb, outs + c, r);
        });
    }
}

// ---- blocks of 256 in the plain layout: Q5_K, Q6_K against Q8_K ----
//
// Order kept: per block, d = d_y*d_x, eight lanes of integers, acc = fma(d, lanes, acc); for Q5_K besides
// summs = fma(-d_y*dmin_x, integer, summs); at the end the lanes are summed, then summs is added.

// The scales of 8 sub-blocks and of their mins, 6 bits each, as bytes: 8 scales, then 8 mins
inline __m128i scales_and_mins(const uint8_t * packed) {
    uint32_t u[4];
    memcpy(u, packed, 12);
    const uint32_t mins_low = u[1] & 0x3f3f3f3f;
    u[3] = ((u[2] >> 4) & 0x0f0f0f0f) | (((u[1] >> 6) & 0x03030303) << 4);
    u[1] = (u[2] & 0x0f0f0f0f) | (((u[0] >> 6) & 0x03030303) << 4);
    u[2] = mins_low;
    u[0] &= 0x3f3f3f3f;
    return _mm_loadu_si128((const __m128i *) u);
}

// 64 bytes from two halves
inline __m512i join(__m256i low, __m256i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

inline __m256i fold(__m512i x) {
    return _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
}

// What the mins of Q5_K need of up to eight columns, a lane a column: per block the scale, and the sums of the
// activations of its eight sub-blocks as four pairs of 16 bits
struct eight_cols {
    float   d[8];
    int32_t pairs[4][8];
};

template <int C>
inline void q5_K_row(int64_t nb, const block_q5_K * x, const char * const * cols, const eight_cols * y8, float * const * outs, int64_t r) {
    __m256 acc[C];
    __m256 summs = _mm256_setzero_ps();
    for (int c = 0; c < C; c++) {
        acc[c] = _mm256_setzero_ps();
    }
    const __m256i low4 = _mm256_set1_epi8(15);
    const __m256i bit4 = _mm256_set1_epi8(16);
    for (int64_t b = 0; b < nb; b++) {
        const __m128i sm   = scales_and_mins(x[b].scales);
        const __m128i mins = _mm_cvtepu8_epi16(_mm_unpackhi_epi64(sm, sm));
        const __m256i high = _mm256_loadu_si256((const __m256i *) x[b].qh);
        const float   dx   = _cvtsh_ss(x[b].d);
        const float   mx   = _cvtsh_ss(x[b].dmin);

        __m512i w[4];
        __m512i scale[4];
        // one scale per sub-block, in the low 16 bits of each of its eight lanes
        const __m512i s32 = _mm512_cvtepu8_epi32(sm);
        for (int j = 0; j < 4; j++) {
            const __m256i q  = _mm256_loadu_si256((const __m256i *) (x[b].qs + 32 * j));
            // bits 2j and 2j+1 of the high bytes go to bit 4
            const __m256i h0 = _mm256_and_si256(j < 2 ? _mm256_slli_epi16(high, 4 - 2 * j) : _mm256_srli_epi16(high, 2 * j - 4), bit4);
            const __m256i h1 = _mm256_and_si256(j < 2 ? _mm256_slli_epi16(high, 3 - 2 * j) : _mm256_srli_epi16(high, 2 * j - 3), bit4);
            w[j]     = join(_mm256_or_si256(_mm256_and_si256(q, low4), h0),
                            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(q, 4), low4), h1));
            scale[j] = _mm512_permutexvar_epi32(
                _mm512_add_epi32(_mm512_set1_epi32(2 * j), _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1)), s32);
        }
        for (int c = 0; c < C; c++) {
            const block_q8_K & y = ((const block_q8_K *) cols[c])[b];
            __m512i sums = _mm512_setzero_si512();
            for (int j = 0; j < 4; j++) {
                // four products of 5 and 8 bits fit 16 bits with their sign, so one 16-bit product applies the scale
                const __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w[j], _mm512_loadu_si512(y.qs + 64 * j));
                sums = _mm512_dpwssd_epi32(sums, dot, scale[j]);
            }
            acc[c] = _mm256_fmadd_ps(_mm256_set1_ps(y.d * dx), _mm256_cvtepi32_ps(fold(sums)), acc[c]);
        }
        __m256i of_mins = _mm256_setzero_si256();
        of_mins = _mm256_dpwssd_epi32(of_mins, _mm256_loadu_si256((const __m256i *) y8[b].pairs[0]), _mm256_broadcastd_epi32(mins));
        of_mins = _mm256_dpwssd_epi32(of_mins, _mm256_loadu_si256((const __m256i *) y8[b].pairs[1]), _mm256_broadcastd_epi32(_mm_srli_si128(mins, 4)));
        of_mins = _mm256_dpwssd_epi32(of_mins, _mm256_loadu_si256((const __m256i *) y8[b].pairs[2]), _mm256_broadcastd_epi32(_mm_srli_si128(mins, 8)));
        of_mins = _mm256_dpwssd_epi32(of_mins, _mm256_loadu_si256((const __m256i *) y8[b].pairs[3]), _mm256_broadcastd_epi32(_mm_srli_si128(mins, 12)));
        const __m256 dmin = _mm256_mul_ps(_mm256_loadu_ps(y8[b].d), _mm256_set1_ps(-mx));
        summs = _mm256_fmadd_ps(dmin, _mm256_cvtepi32_ps(of_mins), summs);
    }
    alignas(32) float sum_of_mins[8];
    _mm256_store_ps(sum_of_mins, summs);
    for (int c = 0; c < C; c++) {
        outs[c][r] = sum_lanes(acc[c]) + sum_of_mins[c];
    }
}

template <int C>
inline void q6_K_row(int64_t nb, const block_q6_K * x, const char * const * cols, float * const * outs, int64_t r) {
    __m256 acc[C];
    for (int c = 0; c < C; c++) {
        acc[c] = _mm256_setzero_ps();
    }
    const __m256i low4  = _mm256_set1_epi8(15);
    const __m256i bits  = _mm256_set1_epi8(48);
    const __m512i low16 = _mm512_set1_epi32(0xffff);
    for (int64_t b = 0; b < nb; b++) {
        const __m128i s8 = _mm_loadu_si128((const __m128i *) x[b].scales);
        const float   dx = _cvtsh_ss(x[b].d);

        __m512i w[4];
        __m512i scale[4];
        for (int half = 0; half < 2; half++) {
            const __m256i l0 = _mm256_loadu_si256((const __m256i *) (x[b].ql + 64 * half));
            const __m256i l1 = _mm256_loadu_si256((const __m256i *) (x[b].ql + 64 * half + 32));
            const __m256i h  = _mm256_loadu_si256((const __m256i *) (x[b].qh + 32 * half));
            w[2 * half] = join(
                _mm256_or_si256(_mm256_and_si256(l0, low4), _mm256_and_si256(_mm256_slli_epi16(h, 4), bits)),
                _mm256_or_si256(_mm256_and_si256(l1, low4), _mm256_and_si256(_mm256_slli_epi16(h, 2), bits)));
            w[2 * half + 1] = join(
                _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(l0, 4), low4), _mm256_and_si256(h, bits)),
                _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(l1, 4), low4), _mm256_and_si256(_mm256_srli_epi16(h, 2), bits)));
        }
        // Lanes of four weights, four lanes to a scale; only the low 16 bits of a lane may be set
        const __m512i s32 = _mm512_and_si512(_mm512_cvtepi8_epi32(s8), low16);
        for (int j = 0; j < 4; j++) {
            const __m512i index = _mm512_add_epi32(_mm512_set1_epi32(4 * j),
                                                   _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3));
            scale[j] = _mm512_permutexvar_epi32(index, s32);
        }
        // The weights stand 32 too high; stock takes that off lane by lane, in its own arrangement
        const __m512i s16 = _mm512_zextsi256_si512(_mm256_slli_epi16(_mm256_sub_epi16(_mm256_setzero_si256(), _mm256_cvtepi8_epi16(s8)), 5));
        for (int c = 0; c < C; c++) {
            const block_q8_K & y = ((const block_q8_K *) cols[c])[b];
            const __m512i bsums = _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *) y.bsums));
            __m512i       sums  = _mm512_dpwssd_epi32(_mm512_setzero_si512(), bsums, s16);
            for (int j = 0; j < 4; j++) {
                const __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w[j], _mm512_loadu_si512(y.qs + 64 * j));
                sums = _mm512_dpwssd_epi32(sums, dot, scale[j]);
            }
            acc[c] = _mm256_fmadd_ps(_mm256_set1_ps(y.d * dx), _mm256_cvtepi32_ps(fold(sums)), acc[c]);
        }
    }
    for (int c = 0; c < C; c++) {
        outs[c][r] = sum_lanes(acc[c]);
    }
}

void q5_K_dot(ggml_vec_dot_t, int64_t k, const char * rows, size_t row_stride, int64_t n_rows, const char * const * cols,
              float * const * outs, int n_cols) {
    static thread_local std::vector<eight_cols> buffer;
    const int64_t nb = k / QK_K;
    tiles_of_columns<8>(n_cols, [&](int c0, auto n) {
        buffer.assign(nb, eight_cols{});
        for (int c = 0; c < n.value; c++) {
            const block_q8_K * y = (const block_q8_K *) cols[c0 + c];
            for (int64_t b = 0; b < nb; b++) {
                buffer[b].d[c] = y[b].d;
                const __m256i bsums = _mm256_loadu_si256((const __m256i *) y[b].bsums);
                alignas(16) int32_t pairs[4];
                _mm_store_si128((__m128i *) pairs, _mm_hadd_epi16(_mm256_castsi256_si128(bsums), _mm256_extracti128_si256(bsums, 1)));
                for (int p = 0; p < 4; p++) {
                    buffer[b].pairs[p][c] = pairs[p];
                }
            }
        }
        for (int64_t r = 0; r < n_rows; r++) {
            q5_K_row<n.value>(nb, (const block_q5_K *) (rows + r * row_stride), cols + c0, buffer.data(), outs + c0, r);
        }
    });
}

void q6_K_dot(ggml_vec_dot_t, int64_t k, const char * rows, size_t row_stride, int64_t n_rows, const char * const * cols,
              float * const * outs, int n_cols) {
    for (int64_t r = 0; r < n_rows; r++) {
        tiles_of_columns<8>(n_cols, [&](int c, auto n) {
            q6_K_row<n.value>(k / QK_K, (const block_q6_K *) (rows + r * row_stride), cols + c, outs + c, r);
        });
    }
}

// ---- F16 against F16 ----
//
// Order kept: four accumulators of 16 lanes, of which each takes every fourth group of 16 values by a fused
// multiply-add, then stock's reduction, then what is left over in double.

static_assert(GGML_F32_ARR == 4 && GGML_F32_STEP == 64, "stock's dot product has four accumulators of 16 lanes");

// Numbers in memory that begins at a cache line: a load within a line costs half of one across two
struct aligned_floats {
    std::vector<float> values;

    float * take(size_t n) {
        if (values.size() < n + 16) {
            values.resize(n + 16);
        }
        return (float *) (((uintptr_t) values.data() + 63) / 64 * 64);
    }
};

// R rows against C columns, which stand widened at `wide`, `stride` floats apart. Four accumulators for each of the
// R*C products fill the registers at six products
template <int R, int C>
inline void f16_tile(int64_t k, const char * rows, size_t row_stride, const float * wide, int64_t stride, const char * const * cols,
                     float * const * outs, int64_t r0) {
    const ggml_fp16_t * x[R];
    __m512              acc[R][C][4];
    for (int r = 0; r < R; r++) {
        x[r] = (const ggml_fp16_t *) (rows + (r0 + r) * row_stride);
        for (int c = 0; c < C; c++) {
            for (int j = 0; j < 4; j++) {
                acc[r][c][j] = _mm512_setzero_ps();
            }
        }
    }
    const int64_t np = k / 64 * 64;
    const char *  ahead = rows + (r0 + R) * row_stride;
    for (int64_t i = 0; i < np; i += 64) {
        for (int r = 0; r < R; r++) {
            // Rows may be short, so the hardware hardly notices that they follow each other: ask for the next ones
            _mm_prefetch(ahead + (i * R + 64 * r) * 2, _MM_HINT_T0);
            _mm_prefetch(ahead + (i * R + 64 * r) * 2 + 64, _MM_HINT_T0);
        }
        for (int j = 0; j < 4; j++) {
            __m512 w[R];
            for (int r = 0; r < R; r++) {
                w[r] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) (x[r] + i + 16 * j)));
            }
            for (int c = 0; c < C; c++) {
                __m512 v = _mm512_load_ps(wide + c * stride + i + 16 * j);
                if constexpr (R > 1) {
                    __asm__("" : "+v"(v));  // load it once, not once per row as an operand of each multiply-add
                }
                for (int r = 0; r < R; r++) {
                    acc[r][c][j] = _mm512_fmadd_ps(w[r], v, acc[r][c][j]);
                }
            }
        }
    }
    for (int c = 0; c < C; c++) {
        const ggml_fp16_t * y = (const ggml_fp16_t *) cols[c];
        for (int r = 0; r < R; r++) {
            ggml_float sum;
            GGML_F32x16_REDUCE(sum, acc[r][c]);
            for (int64_t i = np; i < k; i++) {
                sum += (ggml_float) (_cvtsh_ss(x[r][i]) * _cvtsh_ss(y[i]));
            }
            outs[c][r0 + r] = (float) sum;
        }
    }
}

void f16_dot(ggml_vec_dot_t, int64_t k, const char * rows, size_t row_stride, int64_t n_rows, const char * const * cols,
             float * const * outs, int n_cols) {
    // The columns are widened once, for all rows
    static thread_local aligned_floats buffer;
    const int64_t np     = k / 64 * 64;
    const int64_t stride = np + 16;  // not a multiple of 4096 bytes, where columns would fight for the same cache lines
    float *       wide   = buffer.take(stride * n_cols);
    for (int c = 0; c < n_cols; c++) {
        const ggml_fp16_t * y = (const ggml_fp16_t *) cols[c];
        for (int64_t i = 0; i < np; i += 16) {
            _mm512_store_ps(wide + c * stride + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) (y + i))));
        }
    }
    const auto rows_by = [&](auto R, int64_t r) {
        tiles_of_columns<6 / R.value>(n_cols, [&](int c, auto C) {
            f16_tile<R.value, C.value>(k, rows, row_stride, wide + c * stride, stride, cols + c, outs + c, r);
        });
    };
    int64_t r = 0;
    if (n_cols == 2 || n_cols == 4) {
        for (; r + 3 <= n_rows; r += 3) {
            rows_by(std::integral_constant<int, 3>(), r);
        }
    }
    for (; r + 2 <= n_rows; r += 2) {
        rows_by(std::integral_constant<int, 2>(), r);
    }
    for (; r < n_rows; r++) {
        rows_by(std::integral_constant<int, 1>(), r);
    }
}

// ---- Q4_K repacked 8 rows by 8 values, against Q8_K ----
//
// Order kept: per block of 256, acc = fma(sum, d_x*d_y, acc) and acc_min = fma(sum of mins, dmin_x*d_y, acc_min), a lane
// a row; at the end acc - acc_min.

template <int C>
inline void q4_K_8x8_tile(int64_t nb, const block_q4_Kx8 * x, const char * cols, size_t col_size, char * dst, size_t dst_stride) {
    __m256 acc[C];
    __m256 acc_min[C];
    for (int c = 0; c < C; c++) {
        acc[c]     = _mm256_setzero_ps();
        acc_min[c] = _mm256_setzero_ps();
    }
    const __m512i low4 = _mm512_set1_epi8(15);
    for (int64_t b = 0; b < nb; b++) {
        const block_q8_K * y[C];
        __m512i            sums[C];
        __m256i            mins[C];
        __m128i            q8s[C];
        for (int c = 0; c < C; c++) {
            y[c]    = (const block_q8_K *) (cols + c * col_size) + b;
            sums[c] = _mm512_setzero_si512();
            mins[c] = _mm256_setzero_si256();
            const __m256i q8sums = _mm256_loadu_si256((const __m256i *) y[c]->bsums);
            q8s[c] = _mm_hadd_epi16(_mm256_castsi256_si128(q8sums), _mm256_extracti128_si256(q8sums, 1));
        }
        for (int sb = 0; sb < 4; sb++) {  // two sub-blocks of 32 at a time: low nibbles, high nibbles
            const __m128i sm0 = scales_and_mins(x[b].scales + 24 * sb);
            const __m128i sm1 = scales_and_mins(x[b].scales + 24 * sb + 12);
            // a row has two lanes, of which each gets the row's scale in its low 16 bits
            const __m512i scale0 = _mm512_shuffle_epi32(_mm512_cvtepu8_epi64(sm0), (_MM_PERM_ENUM) 0xa0);
            const __m512i scale1 = _mm512_shuffle_epi32(_mm512_cvtepu8_epi64(sm1), (_MM_PERM_ENUM) 0xa0);
            const __m256i min01  = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(_mm_unpackhi_epi64(sm0, sm0), _mm_unpackhi_epi64(sm1, sm1)));

            __m512i dot0[C];
            __m512i dot1[C];
            for (int g = 0; g < 4; g++) {  // eight values of each of the eight rows at a time
                const __m512i raw = _mm512_loadu_si512(x[b].qs + 256 * sb + 64 * g);
                const __m512i w0  = _mm512_and_si512(raw, low4);
                const __m512i w1  = _mm512_and_si512(_mm512_srli_epi16(raw, 4), low4);
                for (int c = 0; c < C; c++) {
                    int64_t v0;
                    int64_t v1;
                    memcpy(&v0, y[c]->qs + 64 * sb + 8 * g, 8);
                    memcpy(&v1, y[c]->qs + 64 * sb + 32 + 8 * g, 8);
                    dot0[c] = _mm512_dpbusd_epi32(g ? dot0[c] : _mm512_setzero_si512(), w0, _mm512_set1_epi64(v0));
                    dot1[c] = _mm512_dpbusd_epi32(g ? dot1[c] : _mm512_setzero_si512(), w1, _mm512_set1_epi64(v1));
                }
            }
            for (int c = 0; c < C; c++) {
                // sixteen products of 4 and 8 bits fit 16 bits with their sign: one 16-bit product applies the scale
                sums[c] = _mm512_dpwssd_epi32(sums[c], dot0[c], scale0);
                sums[c] = _mm512_dpwssd_epi32(sums[c], dot1[c], scale1);
                mins[c] = _mm256_dpwssd_epi32(mins[c], min01, _mm256_broadcastd_epi32(q8s[c]));
                q8s[c]  = _mm_srli_si128(q8s[c], 4);
            }
        }
        const __m256 dx = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) x[b].d));
        const __m256 mx = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) x[b].dmin));
        for (int c = 0; c < C; c++) {
            const __m256  dy  = _mm256_set1_ps(y[c]->d);
            const __m256i sum = _mm512_cvtepi64_epi32(_mm512_add_epi32(sums[c], _mm512_srli_epi64(sums[c], 32)));
            acc[c]     = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(dx, dy), acc[c]);
            acc_min[c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(mins[c]), _mm256_mul_ps(mx, dy), acc_min[c]);
        }
    }
    for (int c = 0; c < C; c++) {
        _mm256_storeu_ps((float *) (dst + c * dst_stride), _mm256_sub_ps(acc[c], acc_min[c]));
    }
}

void q4_K_8x8(int64_t k, const char * weights, size_t row_size, int64_t n_rows, const char * cols, size_t col_size,
              int64_t n_cols, char * dst, size_t dst_stride) {
    for (int64_t r = 0; r < n_rows; r += 8) {
        tiles_of_columns<5>((int) n_cols, [&](int c, auto n) {
            q4_K_8x8_tile<n.value>(k / QK_K, (const block_q4_Kx8 *) (weights + r * row_size), cols + c * col_size, col_size,
                                   dst + c * dst_stride + r * sizeof(float), dst_stride);
        });
    }
}

}  // namespace

exact_dot_kernel exact_x86_dot_kernel(enum ggml_type type) {
    switch (type) {
        case GGML_TYPE_F16:  return f16_dot;
        case GGML_TYPE_Q4_0: return blocks_dot<weights_q4_0>;
        case GGML_TYPE_Q4_1: return blocks_dot<weights_q4_1>;
        case GGML_TYPE_Q5_0: return blocks_dot<weights_q5_0>;
        case GGML_TYPE_Q8_0: return blocks_dot<weights_q8_0>;
        case GGML_TYPE_Q5_K: return q5_K_dot;
        case GGML_TYPE_Q6_K: return q6_K_dot;
        default:             return nullptr;
    }
}

exact_repacked_kernel exact_x86_q4_K_8x8_kernel(void) {
    return q4_K_8x8;
}

#else

exact_dot_kernel exact_x86_dot_kernel(enum ggml_type type) {
    GGML_UNUSED(type);
    return nullptr;
}

exact_repacked_kernel exact_x86_q4_K_8x8_kernel(void) {
    return nullptr;
}

#endif
