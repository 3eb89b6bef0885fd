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
    defined(__FMA__) && defined(__F16C__)
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
            case 3: f(c, std::integral_constant<int, 3>()); break;
            case 4: f(c, std::integral_constant<int, 4>()); break;
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

// R rows against C columns
template <typename W, int R, int C>
inline void blocks_tile(int64_t nb, const char * rows, size_t row_stride, const char * const * cols, float * const * outs, int64_t r0) {
    const typename W::block * x[R];
    const typename W::col *   y[C];
    __m256                    acc[R][C];
    [[maybe_unused]] float    summs[R][C];
    for (int r = 0; r < R; r++) {
        x[r] = (const typename W::block *) (rows + (r0 + r) * row_stride);
        for (int c = 0; c < C; c++) {
            acc[r][c]   = _mm256_setzero_ps();
            summs[r][c] = 0.0f;
        }
    }
    for (int c = 0; c < C; c++) {
        y[c] = (const typename W::col *) cols[c];
    }

    const __m256i sign = _mm256_set1_epi8((char) 0x80);
    for (int64_t b = 0; b < nb; b++) {
        __m256i w[R];
        __m256i first[R];  // what the integer sums start from
        float   dx[R];
        for (int r = 0; r < R; r++) {
            w[r]  = W::load(x[r][b]);
            dx[r] = GGML_CPU_FP16_TO_FP32(x[r][b].d);
            // The signed columns are raised by 128 to suit the unsigned side of the instruction; 128 times the weights is
            // taken off again. Q4_1 has unsigned weights and needs neither
            first[r] = _mm256_setzero_si256();
            if constexpr (!W::HAS_MIN) {
                first[r] = _mm256_sub_epi32(first[r], _mm256_dpbusd_epi32(_mm256_setzero_si256(), sign, w[r]));
            }
        }
        for (int c = 0; c < C; c++) {
            const __m256i q  = _mm256_loadu_si256((const __m256i *) y[c][b].qs);
            const __m256i qu = W::HAS_MIN ? q : _mm256_xor_si256(q, sign);
            const float   dy = GGML_CPU_FP16_TO_FP32(y[c][b].d);
            for (int r = 0; r < R; r++) {
                const __m256i sums = W::HAS_MIN ? _mm256_dpbusd_epi32(first[r], w[r], q) : _mm256_dpbusd_epi32(first[r], qu, w[r]);
                acc[r][c] = _mm256_fmadd_ps(_mm256_set1_ps(dx[r] * dy), _mm256_cvtepi32_ps(sums), acc[r][c]);
                if constexpr (W::HAS_MIN) {
                    summs[r][c] = std::fma(GGML_CPU_FP16_TO_FP32(x[r][b].m), GGML_CPU_FP16_TO_FP32(y[c][b].s), summs[r][c]);
                }
            }
        }
    }
    for (int c = 0; c < C; c++) {
        for (int r = 0; r < R; r++) {
            float sum = sum_lanes(acc[r][c]);
            if constexpr (W::HAS_MIN) {
                sum += summs[r][c];
            }
            outs[c][r0 + r] = sum;
        }
    }
}

template <typename W>
void blocks_dot(ggml_vec_dot_t, int64_t k, const char * rows, size_t row_stride, int64_t n_rows, const char * const * cols,
                float * const * outs, int n_cols) {
    const int64_t nb = k / 32;
    int64_t       r  = 0;
    for (; r + 4 <= n_rows; r += 4) {
        tiles_of_columns<4>(n_cols, [&](int c, auto n) { blocks_tile<W, 4, n.value>(nb, rows, row_stride, cols + c, outs + c, r); });
    }
    for (; r < n_rows; r++) {
        tiles_of_columns<4>(n_cols, [&](int c, auto n) { blocks_tile<W, 1, n.value>(nb, rows, row_stride, cols + c, outs + c, r); });
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

template <int C>
inline void q5_K_row(int64_t nb, const block_q5_K * x, const char * const * cols, float * const * outs, int64_t r) {
    __m256 acc[C];
    float  summs[C];
    for (int c = 0; c < C; c++) {
        acc[c]   = _mm256_setzero_ps();
        summs[c] = 0.0f;
    }
    const __m256i low4 = _mm256_set1_epi8(15);
    const __m256i bit4 = _mm256_set1_epi8(16);
    for (int64_t b = 0; b < nb; b++) {
        const __m128i sm   = scales_and_mins(x[b].scales);
        const __m128i mins = _mm_cvtepu8_epi16(_mm_unpackhi_epi64(sm, sm));
        const __m256i high = _mm256_loadu_si256((const __m256i *) x[b].qh);
        const float   dx   = GGML_CPU_FP16_TO_FP32(x[b].d);
        const float   mx   = GGML_CPU_FP16_TO_FP32(x[b].dmin);

        __m512i w[4];
        __m512i scale[4];
        for (int j = 0; j < 4; j++) {
            const __m256i q    = _mm256_loadu_si256((const __m256i *) (x[b].qs + 32 * j));
            // bits 2j and 2j+1 of the high bytes go to bit 4
            const __m256i h0   = _mm256_and_si256(j < 2 ? _mm256_slli_epi16(high, 4 - 2 * j) : _mm256_srli_epi16(high, 2 * j - 4), bit4);
            const __m256i h1   = _mm256_and_si256(j < 2 ? _mm256_slli_epi16(high, 3 - 2 * j) : _mm256_srli_epi16(high, 2 * j - 3), bit4);
            w[j] = join(_mm256_or_si256(_mm256_and_si256(q, low4), h0),
                        _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(q, 4), low4), h1));
        }
        {
            // one scale per sub-block, in the low 16 bits of each lane
            alignas(16) uint8_t s[16];
            _mm_store_si128((__m128i *) s, sm);
            for (int j = 0; j < 4; j++) {
                scale[j] = join(_mm256_set1_epi32(s[2 * j]), _mm256_set1_epi32(s[2 * j + 1]));
            }
        }
        for (int c = 0; c < C; c++) {
            const block_q8_K & y = ((const block_q8_K *) cols[c])[b];
            __m512i sums = _mm512_setzero_si512();
            for (int j = 0; j < 4; j++) {
                // four products of 5 and 8 bits fit 16 bits with their sign, so one 16-bit product applies the scale
                const __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w[j], _mm512_loadu_si512(y.qs + 64 * j));
                sums = _mm512_dpwssd_epi32(sums, dot, scale[j]);
            }
            const __m256i q8sums = _mm256_loadu_si256((const __m256i *) y.bsums);
            const __m128i q8s    = _mm_hadd_epi16(_mm256_castsi256_si128(q8sums), _mm256_extracti128_si256(q8sums, 1));
            __m128i       prod   = _mm_madd_epi16(mins, q8s);
            prod = _mm_add_epi32(prod, _mm_shuffle_epi32(prod, 0x4e));
            prod = _mm_add_epi32(prod, _mm_shuffle_epi32(prod, 0xb1));
            summs[c] = std::fma(-(y.d * mx), (float) _mm_cvtsi128_si32(prod), summs[c]);
            acc[c]   = _mm256_fmadd_ps(_mm256_set1_ps(y.d * dx), _mm256_cvtepi32_ps(fold(sums)), acc[c]);
        }
    }
    for (int c = 0; c < C; c++) {
        outs[c][r] = sum_lanes(acc[c]) + summs[c];
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
        const float   dx = GGML_CPU_FP16_TO_FP32(x[b].d);

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
        const __m256i s16 = _mm256_cvtepi8_epi16(s8);
        for (int c = 0; c < C; c++) {
            const block_q8_K & y = ((const block_q8_K *) cols[c])[b];
            __m512i sums = _mm512_setzero_si512();
            for (int j = 0; j < 4; j++) {
                const __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w[j], _mm512_loadu_si512(y.qs + 64 * j));
                sums = _mm512_dpwssd_epi32(sums, dot, scale[j]);
            }
            const __m256i off   = _mm256_slli_epi32(_mm256_madd_epi16(_mm256_loadu_si256((const __m256i *) y.bsums), s16), 5);
            const __m256i lanes = _mm256_sub_epi32(fold(sums), off);
            acc[c] = _mm256_fmadd_ps(_mm256_set1_ps(y.d * dx), _mm256_cvtepi32_ps(lanes), acc[c]);
        }
    }
    for (int c = 0; c < C; c++) {
        outs[c][r] = sum_lanes(acc[c]);
    }
}

void q5_K_dot(ggml_vec_dot_t, int64_t k, const char * rows, size_t row_stride, int64_t n_rows, const char * const * cols,
              float * const * outs, int n_cols) {
    for (int64_t r = 0; r < n_rows; r++) {
        tiles_of_columns<8>(n_cols, [&](int c, auto n) {
            q5_K_row<n.value>(k / QK_K, (const block_q5_K *) (rows + r * row_stride), cols + c, outs + c, r);
        });
    }
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
// Order kept: four accumulators of 16 lanes, a fused multiply-add each per 64 values, then stock's reduction, then what
// is left over in double.

template <int R, int C>
inline void f16_tile(int64_t k, const char * rows, size_t row_stride, const float * const * wide, const char * const * cols,
                     float * const * outs, int64_t r0) {
    const ggml_fp16_t * x[R];
    __m512              acc[R][C][GGML_F32_ARR];
    for (int r = 0; r < R; r++) {
        x[r] = (const ggml_fp16_t *) (rows + (r0 + r) * row_stride);
        for (int c = 0; c < C; c++) {
            for (int j = 0; j < GGML_F32_ARR; j++) {
                acc[r][c][j] = _mm512_setzero_ps();
            }
        }
    }
    const int64_t np = k & ~(int64_t) (GGML_F32_STEP - 1);
    for (int64_t i = 0; i < np; i += GGML_F32_STEP) {
        for (int j = 0; j < GGML_F32_ARR; j++) {
            __m512 w[R];
            for (int r = 0; r < R; r++) {
                w[r] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) (x[r] + i + 16 * j)));
            }
            for (int c = 0; c < C; c++) {
                const __m512 v = _mm512_loadu_ps(wide[c] + i + 16 * j);
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
                sum += (ggml_float) (GGML_CPU_FP16_TO_FP32(x[r][i]) * GGML_CPU_FP16_TO_FP32(y[i]));
            }
            outs[c][r0 + r] = (float) sum;
        }
    }
}

void f16_dot(ggml_vec_dot_t, int64_t k, const char * rows, size_t row_stride, int64_t n_rows, const char * const * cols,
             float * const * outs, int n_cols) {
    // The columns are widened once, for all rows
    static thread_local std::vector<float> buffer;
    constexpr int                          MAX_COLS = 64;
    const float *                          wide[MAX_COLS];
    const int64_t                          stride = (k + 15) / 16 * 16 + 16;
    GGML_ASSERT(n_cols <= MAX_COLS);
    if (buffer.size() < (size_t) (stride * n_cols)) {
        buffer.resize(stride * n_cols);
    }
    for (int c = 0; c < n_cols; c++) {
        float * to = buffer.data() + c * stride;
        for (int64_t i = 0; i + 16 <= k; i += 16) {
            _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) ((const ggml_fp16_t *) cols[c] + i))));
        }
        wide[c] = to;
    }
    int64_t r = 0;
    for (; r + 2 <= n_rows; r += 2) {
        tiles_of_columns<4>(n_cols, [&](int c, auto n) {
            // two rows by three columns fill the registers
            if constexpr (n.value <= 3) {
                f16_tile<2, n.value>(k, rows, row_stride, wide + c, cols + c, outs + c, r);
            } else {
                f16_tile<2, 2>(k, rows, row_stride, wide + c, cols + c, outs + c, r);
                f16_tile<2, n.value - 2>(k, rows, row_stride, wide + c + 2, cols + c + 2, outs + c + 2, r);
            }
        });
    }
    for (; r < n_rows; r++) {
        tiles_of_columns<4>(n_cols, [&](int c, auto n) {
            f16_tile<1, n.value>(k, rows, row_stride, wide + c, cols + c, outs + c, r);
        });
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
        tiles_of_columns<8>((int) n_cols, [&](int c, auto n) {
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
