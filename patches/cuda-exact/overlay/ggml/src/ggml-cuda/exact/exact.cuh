// Exact batches on CUDA: a pass of 2 to 16 tokens gives each token the bits that it would have had alone.
//
// The width-1 arithmetic of the stock build is the reference and is never changed. Every place where stock picks
// another kernel, another geometry or another split because a pass has more than one token asks here first. The
// README of this patch lists those places and the order that each kernel keeps.

#pragma once

#include "../common.cuh"

// ---- read back by programs (exported) ----

extern "C" {

// 1 if exact batches are on, 0 if GGML_CUDA_EXACT=0 turned them off
GGML_BACKEND_API int ggml_cuda_exact_enabled(void);

// The widest pass, in tokens, that is kept exact
GGML_BACKEND_API int ggml_cuda_exact_max_tokens(void);

// What passes of 2 to ggml_cuda_exact_max_tokens() tokens met so far that is not kept exact: one short sentence per
// kind, separated by newlines; empty if everything was covered. The pointer stays valid for the life of the process
GGML_BACKEND_API const char * ggml_cuda_exact_report(void);

}

// ---- asked by ggml-cuda.cu ----

// Stock's own functions, handed over because they are private to their file
typedef void (*ggml_cuda_exact_mul_mat_t)(ggml_backend_cuda_context & ctx, const ggml_tensor * src0,
                                          const ggml_tensor * src1, ggml_tensor * dst);
typedef void (*ggml_cuda_exact_op_t)(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// Looks at a graph about to run: reports what in it is not covered, and forgets what was known about the last graph's
// masks. Called for each pass, also for one that is replayed from a CUDA graph
void ggml_cuda_exact_begin(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph);

// True if this graph needs the number of visible KV cells on the host, so that it cannot be a CUDA graph
bool ggml_cuda_exact_needs_host(const ggml_cgraph * cgraph);

// True if the op belongs to a pass of 2 to 16 tokens and must keep the width-1 order (so it is not fused as a batch)
bool ggml_cuda_exact_op(const ggml_tensor * op);

// Each computes the op in the width-1 order and returns true, or returns false and leaves it to stock
bool ggml_cuda_exact_mul_mat(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1,
                             ggml_tensor * dst, ggml_cuda_exact_mul_mat_t stock);
bool ggml_cuda_exact_mul_mat_id(ggml_backend_cuda_context & ctx, ggml_tensor * dst, ggml_cuda_exact_op_t stock);
bool ggml_cuda_exact_flash_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
bool ggml_cuda_exact_soft_max(ggml_backend_cuda_context & ctx, ggml_tensor * dst, ggml_cuda_exact_op_t stock);

// ---- between the files of this patch ----

constexpr int64_t EXACT_MAX_TOKENS = 16;

// Notes something that is not covered; the first time, it is logged too
void ggml_cuda_exact_note(const char * what, const char * detail = nullptr);

// Attention without flash attention: K·Q or V·softmax(K·Q), each query with the number of KV cells of its own pass
bool ggml_cuda_exact_attention_product(ggml_backend_cuda_context & ctx, const ggml_tensor * src0,
                                       const ggml_tensor * src1, ggml_tensor * dst, ggml_cuda_exact_mul_mat_t stock);

// Quantized weights times 2 to 16 columns in the order of stock's one-column kernel. False where there is no kernel
// of ours for this type or this device
bool ggml_cuda_exact_mul_mat_vec_q(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1,
                                   ggml_tensor * dst);

// A new graph: activations laid out for the last one are another's now (exact-mmvq.cu)
void ggml_cuda_exact_forget_activations(ggml_backend_cuda_context & ctx);

// Flash attention where stock's choice for a token alone is its vector kernel (exact-fattn.cu)
bool ggml_cuda_exact_flash_attn_vec_serves(int device, const ggml_tensor * dst);
void ggml_cuda_exact_flash_attn_vec(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void ggml_cuda_exact_forget_geometry(ggml_backend_cuda_context & ctx);

// True once a query was seen whose visible KV cells are not one run from cell 0
bool ggml_cuda_exact_gaps_seen();

// In fattn.cu: true if stock's vector kernel serves this op
bool ggml_cuda_exact_is_vec(int device, const ggml_tensor * dst);

// A new graph: what was known about the masks of the last one no longer holds; whose product is whose (exact-attn.cu)
void ggml_cuda_exact_begin_attention(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph);
