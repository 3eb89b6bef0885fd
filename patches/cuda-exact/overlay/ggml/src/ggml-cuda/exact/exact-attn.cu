#include "exact.cuh"

bool ggml_cuda_exact_flash_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst) { GGML_UNUSED_VARS(ctx, dst); return false; }
bool ggml_cuda_exact_soft_max(ggml_backend_cuda_context & ctx, ggml_tensor * dst, ggml_cuda_exact_op_t stock) { GGML_UNUSED_VARS(ctx, dst, stock); return false; }
bool ggml_cuda_exact_attention_product(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, ggml_tensor * dst, ggml_cuda_exact_mul_mat_t stock) { GGML_UNUSED_VARS(ctx, src0, src1, dst, stock); return false; }
bool ggml_cuda_exact_needs_host(const ggml_cgraph * cgraph) { GGML_UNUSED(cgraph); return false; }
void ggml_cuda_exact_forget_masks(ggml_backend_cuda_context & ctx) { GGML_UNUSED(ctx); }
