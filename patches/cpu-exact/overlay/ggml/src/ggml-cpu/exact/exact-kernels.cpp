// See exact-kernels.h. Which kernel serves which type, the checks that a kernel has to pass before it serves, and the
// portable fallback. The kernels themselves are in exact-kernels-x86.cpp.

#include "exact-kernels.h"

#include "ggml-common.h"
#include "ggml-impl.h"
#include "ggml.h"

#include <cstring>
#include <vector>

namespace {

// Stock's own dot product, a few rows at a time so that they are still in the cache when the next column comes
void dot_loop(ggml_vec_dot_t vec_dot, int64_t k, const char * rows, size_t row_stride, int64_t n_rows,
              const char * const * cols, float * const * outs, int n_cols) {
    for (int64_t r0 = 0; r0 < n_rows; r0 += 4) {
        const int64_t r1 = r0 + 4 < n_rows ? r0 + 4 : n_rows;
        for (int c = 0; c < n_cols; c++) {
            for (int64_t r = r0; r < r1; r++) {
                vec_dot((int) k, outs[c] + r, 0, rows + r * row_stride, 0, cols[c], 0, 1);
            }
        }
    }
}

// Numbers in [-1, 1), the same on every machine
struct numbers {
    uint32_t state = 1;

    float next() {
        state = state * 1664525u + 1013904223u;
        return (int32_t) state / 2147483648.0f;
    }

    std::vector<float> take(size_t n) {
        std::vector<float> v(n);
        for (size_t i = 0; i < n; i++) {
            const float scale = i / 32 % 3 == 0 ? 8.0f : 1.0f;  // blocks of unlike size, so that sums round
            v[i]              = next() * scale;
        }
        return v;
    }
};

constexpr int CHECK_ROWS = 13;  // leaves a remainder for every row tile
constexpr int CHECK_COLS = 16;

// A kernel serves only if it gives the bits of stock's dot product. What the compiler contracts into a fused
// multiply-add is its choice, so this is tried in the very build that will run: a few rows, every number of columns
bool agrees_with_vec_dot(exact_dot_kernel kernel, ggml_type type) {
    const auto *    traits   = ggml_get_type_traits_cpu(type);
    const ggml_type col_type = traits->vec_dot_type;
    const ggml_from_float_t from_float_col = ggml_get_type_traits_cpu(col_type)->from_float;
    if (traits->vec_dot == nullptr || traits->from_float == nullptr || from_float_col == nullptr) {
        return false;
    }
    const int64_t block = ggml_blck_size(type);
    for (int64_t blocks : { 1, 3, 8 }) {
        const int64_t     k        = block >= 32 ? block * blocks : 40 * blocks;
        const size_t      row_size = ggml_row_size(type, k);
        const size_t      col_size = ggml_row_size(col_type, k);
        numbers           source;
        std::vector<char> rows(row_size * CHECK_ROWS);
        std::vector<char> cols(col_size * CHECK_COLS);
        for (int r = 0; r < CHECK_ROWS; r++) {
            traits->from_float(source.take(k).data(), rows.data() + r * row_size, k);
        }
        for (int c = 0; c < CHECK_COLS; c++) {
            from_float_col(source.take(k).data(), cols.data() + c * col_size, k);
        }
        std::vector<float> want(CHECK_ROWS * CHECK_COLS);
        const char *       col_ptrs[CHECK_COLS];
        for (int c = 0; c < CHECK_COLS; c++) {
            col_ptrs[c] = cols.data() + c * col_size;
            for (int r = 0; r < CHECK_ROWS; r++) {
                traits->vec_dot((int) k, &want[c * CHECK_ROWS + r], 0, rows.data() + r * row_size, 0, col_ptrs[c], 0, 1);
            }
        }
        for (int n = 1; n <= CHECK_COLS; n++) {
            std::vector<float> got(CHECK_ROWS * n, -1.0f);
            float *            outs[CHECK_COLS];
            for (int c = 0; c < n; c++) {
                outs[c] = &got[c * CHECK_ROWS];
            }
            kernel(traits->vec_dot, k, rows.data(), row_size, CHECK_ROWS, col_ptrs, outs, n);
            if (memcmp(got.data(), want.data(), got.size() * sizeof(float)) != 0) {
                return false;
            }
        }
    }
    return true;
}

// The same for a repacked layout. Every bit pattern is a valid weight but for the half-precision scales, which are
// the first 2*n_scales bytes of a block of all rows of a group
bool agrees_with_gemv(exact_repacked_kernel kernel, ggml_type type, int64_t group, ggml_cpu_exact_gemv_t gemv, int n_scales) {
    const auto *    traits   = ggml_get_type_traits_cpu(type);
    const ggml_type col_type = traits->vec_dot_type;
    const ggml_from_float_t from_float_col = ggml_get_type_traits_cpu(col_type)->from_float;
    const int64_t   n_rows   = 3 * group;
    for (int64_t blocks : { 1, 3, 8 }) {
        const int64_t     k          = ggml_blck_size(type) * blocks;
        const size_t      row_size   = ggml_row_size(type, k);
        const size_t      col_size   = ggml_row_size(col_type, k);
        const size_t      block_size = ggml_type_size(type) * group;
        numbers           source;
        std::vector<char> weights(row_size * n_rows);
        std::vector<char> cols(col_size * CHECK_COLS);
        for (size_t i = 0; i < weights.size(); i++) {
            weights[i] = (char) (int) (source.next() * 128.0f);
        }
        for (size_t b = 0; b < weights.size(); b += block_size) {
            for (int s = 0; s < n_scales; s++) {
                const ggml_fp16_t scale = ggml_fp32_to_fp16(source.next() * 0.01f);
                memcpy(&weights[b + s * sizeof(scale)], &scale, sizeof(scale));
            }
        }
        for (int c = 0; c < CHECK_COLS; c++) {
            from_float_col(source.take(k).data(), cols.data() + c * col_size, k);
        }
        for (int n = 1; n <= CHECK_COLS; n++) {
            std::vector<float> want(n_rows * n);
            std::vector<float> got(n_rows * n, -1.0f);
            for (int c = 0; c < n; c++) {
                gemv((int) k, &want[c * n_rows], n_rows, weights.data(), cols.data() + c * col_size, 1, (int) n_rows);
            }
            kernel(k, weights.data(), row_size, n_rows, cols.data(), col_size, n, (char *) got.data(), n_rows * sizeof(float));
            if (memcmp(got.data(), want.data(), got.size() * sizeof(float)) != 0) {
                return false;
            }
        }
    }
    return true;
}

exact_dot_kernel checked(exact_dot_kernel kernel, ggml_type type) {
    if (kernel == nullptr) {
        return dot_loop;
    }
    if (!agrees_with_vec_dot(kernel, type)) {
        GGML_LOG_INFO("cpu-exact: the %s kernel does not give stock's bits in this build, looping over stock's instead\n",
                      ggml_type_name(type));
        return dot_loop;
    }
    return kernel;
}

exact_repacked_kernel checked(exact_repacked_kernel kernel, ggml_type type, int64_t group, ggml_cpu_exact_gemv_t gemv, int n_scales) {
    if (kernel != nullptr && !agrees_with_gemv(kernel, type, group, gemv, n_scales)) {
        GGML_LOG_INFO("cpu-exact: the repacked %s kernel does not give stock's bits in this build, looping over stock's instead\n",
                      ggml_type_name(type));
        return nullptr;
    }
    return kernel;
}

}  // namespace

exact_dot_kernel exact_dot_kernel_for(enum ggml_type type) {
    switch (type) {
        // one check per type and process, by whichever thread comes first
        case GGML_TYPE_F16:  { static const auto k = checked(exact_x86_dot_kernel(GGML_TYPE_F16),  GGML_TYPE_F16);  return k; }
        case GGML_TYPE_Q4_0: { static const auto k = checked(exact_x86_dot_kernel(GGML_TYPE_Q4_0), GGML_TYPE_Q4_0); return k; }
        case GGML_TYPE_Q4_1: { static const auto k = checked(exact_x86_dot_kernel(GGML_TYPE_Q4_1), GGML_TYPE_Q4_1); return k; }
        case GGML_TYPE_Q5_0: { static const auto k = checked(exact_x86_dot_kernel(GGML_TYPE_Q5_0), GGML_TYPE_Q5_0); return k; }
        case GGML_TYPE_Q8_0: { static const auto k = checked(exact_x86_dot_kernel(GGML_TYPE_Q8_0), GGML_TYPE_Q8_0); return k; }
        case GGML_TYPE_Q5_K: { static const auto k = checked(exact_x86_dot_kernel(GGML_TYPE_Q5_K), GGML_TYPE_Q5_K); return k; }
        case GGML_TYPE_Q6_K: { static const auto k = checked(exact_x86_dot_kernel(GGML_TYPE_Q6_K), GGML_TYPE_Q6_K); return k; }
        default:
            return dot_loop;
    }
}

exact_repacked_kernel exact_repacked_kernel_for(enum ggml_type type, int64_t inter, int64_t group,
                                                ggml_cpu_exact_gemv_t gemv) {
    if (type == GGML_TYPE_Q4_K && inter == 8 && group == 8) {
        // 8 scales and 8 scales of the mins
        static const auto kernel = checked(exact_x86_q4_K_8x8_kernel(), type, group, gemv, 16);
        return kernel;
    }
    return nullptr;
}

bool exact_stock_keeps_order(enum ggml_type type) {
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    // llamafile_sgemm takes these, and its kernel does per block of 32 what vec_dot does: one product of the two
    // scales, eight integer sums of four products, one fused multiply-add into eight lanes, and the same last sum of the
    // lanes. (Not so IQ4_NL: its vec_dot has two accumulators.) Where there is a kernel of ours, that one is faster
    return (type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_0 || type == GGML_TYPE_Q5_0) && exact_dot_kernel_for(type) == dot_loop;
#else
    GGML_UNUSED(type);
    return false;
#endif
}

bool exact_stock_keeps_order_repacked(enum ggml_type type, int64_t inter, int64_t group) {
#if defined(__AVX2__) && defined(__FMA__)
    // The 4-row and 16-row kernels of these layouts do per block of 32 what the one-row kernel does: one product of the
    // two scales and one fused multiply-add of the integer sum of all 32 products. Their activations are
    // quantized four rows at a time, by the same arithmetic
    return inter == 8 && group == 8 && (type == GGML_TYPE_Q4_0 || type == GGML_TYPE_IQ4_NL || type == GGML_TYPE_MXFP4);
#else
    GGML_UNUSED(type);
    GGML_UNUSED(inter);
    GGML_UNUSED(group);
    return false;
#endif
}
