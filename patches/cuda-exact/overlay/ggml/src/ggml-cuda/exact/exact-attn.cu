// Attention where the fast path of exact-fattn.cu does not serve: each query with the shapes of its own pass, in stock's
// own kernels.

#include "exact.cuh"

bool ggml_cuda_exact_flash_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    if (!ggml_cuda_exact_op(dst)) {
        return false;
    }
    if (ggml_cuda_exact_flash_attn_vec_serves(ctx.device, dst)) {
        ggml_cuda_exact_flash_attn_vec(ctx, dst);
        return true;
    }
    ggml_cuda_exact_note("flash attention that one token alone does not give to stock's vector kernel", dst->name);
    return false;
}

bool ggml_cuda_exact_soft_max(ggml_backend_cuda_context & ctx, ggml_tensor * dst, ggml_cuda_exact_op_t stock) {
    GGML_UNUSED_VARS(ctx, stock);
    if (ggml_cuda_exact_op(dst) && dst->src[1] != nullptr) {
        ggml_cuda_exact_note("attention without flash attention");
    }
    return false;
}

bool ggml_cuda_exact_attention_product(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1,
                                       ggml_tensor * dst, ggml_cuda_exact_mul_mat_t stock) {
    GGML_UNUSED_VARS(ctx, src0, src1, dst, stock);
    ggml_cuda_exact_note("a product of two activations");
    return false;
}

bool ggml_cuda_exact_needs_host(const ggml_cgraph * cgraph) {
    GGML_UNUSED(cgraph);
    return false;
}

void ggml_cuda_exact_forget_masks(ggml_backend_cuda_context & ctx) {
    ggml_cuda_exact_forget_geometry(ctx);
}
