// Exact batches: a pass of 2 to 16 tokens gives each token the bits that it would have had alone.
//
// The width-1 arithmetic of the stock build is the reference and is never changed. Every place where stock picks
// another kernel, and with it another order of float operations, because a pass has more than one token asks here
// first. The README of this patch lists those places and the order that each kernel keeps.

#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;
struct ggml_cgraph;

// ---- read back by programs (exported) ----

// 1 if exact batches are on, 0 if GGML_CPU_EXACT=0 turned them off
GGML_BACKEND_API int ggml_cpu_exact_enabled(void);

// The widest pass, in tokens, that is kept exact
GGML_BACKEND_API int ggml_cpu_exact_max_tokens(void);

// What passes of 2 to ggml_cpu_exact_max_tokens() tokens met so far that is not kept exact: one short sentence per
// kind, separated by newlines; empty if everything was covered. The pointer stays valid for the life of the process
GGML_BACKEND_API const char * ggml_cpu_exact_report(void);

// ---- asked by the CPU backend ----

// Reads GGML_CPU_EXACT; a value other than 0 and 1 ends the program with a message
void ggml_cpu_exact_init(void);

// True if this MUL_MAT, MUL_MAT_ID or FLASH_ATTN_EXT belongs to a pass of 2 to 16 tokens and must keep the width-1 order
bool ggml_cpu_exact_op(const struct ggml_tensor * op);

// The same, but false where stock's kernel for several columns is proven to give the width-1 bits by itself
bool ggml_cpu_exact_op_differs(const struct ggml_tensor * op);

// The same for weights repacked in groups of `group` rows, `inter` values at a time
bool ggml_cpu_exact_op_differs_repacked(const struct ggml_tensor * op, int64_t inter, int64_t group);

// Looks once at a graph about to run and reports what in it is not covered. One thread, before the others start
void ggml_cpu_exact_inspect(const struct ggml_cgraph * cgraph, int n_threads);

// Notes something that is not covered; the first time, it is logged too. `what` must be a string literal or
// outlive the process, `detail` may be NULL
void ggml_cpu_exact_note(const char * what, const char * detail);

// MUL_MAT for weights in their plain layout. src1 is already in the type that the dot product takes, in
// params->wdata where it had to be converted, and the shared chunk counter stands at nth
void ggml_cpu_exact_mul_mat(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// stock's one-row kernel for a repacked layout
typedef void (*ggml_cpu_exact_gemv_t)(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc);

// MUL_MAT for repacked weights: n_cols activation rows of type block_q8_0 or block_q8_K, col_size bytes apart, against
// n_rows weight rows of row_size bytes each, repacked in groups of `group` rows; dst columns are dst_stride bytes apart
void ggml_cpu_exact_mul_mat_repacked(enum ggml_type type, int64_t inter, int64_t group, ggml_cpu_exact_gemv_t gemv,
                                     int64_t k, const char * weights, size_t row_size, int64_t n_rows,
                                     const char * cols, size_t col_size, int64_t n_cols,
                                     char * dst, size_t dst_stride);

#ifdef __cplusplus
}
#endif
