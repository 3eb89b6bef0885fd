// Dot products of a few weight rows with several columns, each column in the float order of stock's one-column kernel.

#pragma once

#include "exact.h"
#include "ggml-cpu.h"

// n_cols columns against n_rows rows (row_stride bytes apart) of k values; outs[c][r] is written.
// vec_dot is stock's kernel for the type, used where there is no better one
typedef void (*exact_dot_kernel)(ggml_vec_dot_t vec_dot, int64_t k, const char * rows, size_t row_stride, int64_t n_rows,
                                 const char * const * cols, float * const * outs, int n_cols);

typedef void (*exact_repacked_kernel)(int64_t k, const char * weights, size_t row_size, int64_t n_rows,
                                      const char * cols, size_t col_size, int64_t n_cols, char * dst, size_t dst_stride);

// The kernel for a weight type in its plain layout; never null
exact_dot_kernel exact_dot_kernel_for(enum ggml_type type);

// The kernel for a repacked layout, or null where only looping over stock's one-row kernel is known to be right
exact_repacked_kernel exact_repacked_kernel_for(enum ggml_type type, int64_t inter, int64_t group,
                                                ggml_cpu_exact_gemv_t gemv);

// True if stock's kernels for several columns of this type (plain layout) give the bits of its vec_dot
bool exact_stock_keeps_order(enum ggml_type type);

// The same for a repacked layout and its one-row kernel
bool exact_stock_keeps_order_repacked(enum ggml_type type, int64_t inter, int64_t group);

// x86: a kernel if the build's instruction set has what it needs, else null
exact_dot_kernel      exact_x86_dot_kernel(enum ggml_type type);
exact_repacked_kernel exact_x86_q4_K_8x8_kernel(void);
