#include "exact-kernels.h"

namespace {

// Stock's own dot product, four rows at a time so that a row is still in the cache when the next column comes
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

}  // namespace

exact_dot_kernel exact_dot_kernel_for(enum ggml_type type) {
    GGML_UNUSED(type);
    return dot_loop;
}

exact_repacked_kernel exact_repacked_kernel_for(enum ggml_type type, int64_t inter, int64_t group,
                                                ggml_cpu_exact_gemv_t gemv) {
    GGML_UNUSED(type);
    GGML_UNUSED(inter);
    GGML_UNUSED(group);
    GGML_UNUSED(gemv);
    return nullptr;
}

bool exact_stock_keeps_order(enum ggml_type type) {
    GGML_UNUSED(type);
    return false;
}
