// Attention where the kernels of exact-fattn.cu do not serve: without flash attention, and where one token alone is not
// given to stock's vector kernel (grouped queries at long contexts, other types in the cache). Each query is computed by
// stock's own functions, in the shapes of the pass that it would have had alone. These follow from the number of KV
// cells that the mask shows to it, which the host must know: such a graph is no CUDA graph, and waits once a mask.

#include "exact.cuh"

#include "../fattn.cuh"
#include "ggml-impl.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

constexpr int64_t KV_PADDING = 256;  // what a cache pads its number of cells to

struct host_mask {
    std::vector<int64_t> cells;  // [stream][query]: the cells of the pass that the query would have had alone
};

struct attention_state {
    std::unordered_map<const ggml_tensor *, const ggml_tensor *> mask_of;  // products without flash attention
    std::unordered_map<const ggml_tensor *, host_mask>           masks;
};

std::mutex state_mutex;

attention_state & state_of(ggml_backend_cuda_context & ctx) {
    static std::map<std::pair<const void *, int>, attention_state> all;
    std::lock_guard<std::mutex> lock(state_mutex);
    return all[{ &ctx, ctx.device }];
}

// The product that gave the scores of a softmax, through operations that keep their shape; null if it is another thing
const ggml_tensor * product_behind(const ggml_tensor * t) {
    while (t != nullptr && t->op != GGML_OP_MUL_MAT) {
        const bool keeps_shape = t->op == GGML_OP_SCALE || t->op == GGML_OP_UNARY || t->op == GGML_OP_ADD ||
                                 t->op == GGML_OP_CONT || t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE;
        t = keeps_shape ? t->src[0] : nullptr;
    }
    return t;
}

bool is_attention(const ggml_tensor * soft_max) {
    return soft_max->op == GGML_OP_SOFT_MAX && soft_max->src[1] != nullptr && ggml_cuda_exact_op(soft_max);
}

bool needs_host(const ggml_tensor * op) {
    return is_attention(op) || (op->op == GGML_OP_FLASH_ATTN_EXT && ggml_cuda_exact_op(op) && op->src[3] != nullptr &&
                                !ggml_cuda_exact_flash_attn_vec_serves(ggml_cuda_get_device(), op));
}

// Copies a mask to the host, once a pass, and counts. n_queries a stream: a mask may have more rows
const host_mask & look_at(ggml_backend_cuda_context & ctx, const ggml_tensor * mask, int64_t n_queries) {
    attention_state & state = state_of(ctx);
    const auto        found = state.masks.find(mask);
    if (found != state.masks.end()) {
        return found->second;
    }
    const int64_t     n_kv = mask->ne[0];
    const size_t      size = ggml_type_size(mask->type);
    const size_t      row_bytes = n_kv * size;
    std::vector<char> rows(row_bytes * n_queries * mask->ne[3]);
    for (int64_t stream = 0; stream < mask->ne[3]; stream++) {
        CUDA_CHECK(cudaMemcpy2DAsync(rows.data() + stream * n_queries * row_bytes, row_bytes,
                                     (const char *) mask->data + stream * mask->nb[3], mask->nb[1], row_bytes, n_queries,
                                     cudaMemcpyDeviceToHost, ctx.stream()));
    }
    CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
    host_mask result;
    for (int64_t stream = 0; stream < mask->ne[3]; stream++) {
        for (int64_t query = 0; query < n_queries; query++) {
            const char * row = rows.data() + (stream * n_queries + query) * row_bytes;
            int64_t count = 0;
            int64_t end   = 0;
            for (int64_t i = 0; i < n_kv; i++) {
                const bool hidden = mask->type == GGML_TYPE_F16 ? ((const ggml_fp16_t *) row)[i] == 0xfc00 :
                                                                  ((const float *) row)[i] == -INFINITY;
                if (!hidden) {
                    count++;
                    end = i + 1;
                }
            }
            if (count != end) {
                ggml_cuda_exact_note("the KV cells a token sees are not one run from cell 0 (sliding window, or one cache "
                                     "shared by several sequences): the split that it would have had alone is unknown");
            }
            result.cells.push_back(count == end ? std::min<int64_t>(GGML_PAD(std::max<int64_t>(count, 1), KV_PADDING), n_kv) : n_kv);
        }
    }
    return state.masks[mask] = std::move(result);
}

int64_t cells_of(const host_mask & mask, int64_t n_queries, int64_t stream, int64_t query) {
    const int64_t n_streams = mask.cells.size() / n_queries;
    return mask.cells[(stream % n_streams) * n_queries + query];
}

// One query of one stream: dimension 1 is the query, dimension 3 the stream
ggml_tensor of_query(const ggml_tensor & t, int64_t query, int64_t stream) {
    ggml_tensor one = t;
    one.ne[1] = 1;
    one.ne[3] = 1;
    one.data  = (char *) t.data + query * t.nb[1] + (stream % t.ne[3]) * t.nb[3];
    return one;
}

// All cells of one stream that a query would have had alone: `dimension` is that of the cells
ggml_tensor of_stream(const ggml_tensor & t, int dimension, int64_t cells, int64_t stream) {
    ggml_tensor one   = t;
    one.ne[dimension] = cells;
    one.ne[3]         = 1;
    one.data          = (char *) t.data + (stream % t.ne[3]) * t.nb[3];
    return one;
}

// The same numbers, or room for them, as a contiguous tensor in `buffer` with `width` values a head: [width, 1, heads, 1]
ggml_tensor packed(const ggml_tensor & t, int64_t width, float * buffer) {
    ggml_tensor one = t;
    one.view_src = nullptr;
    one.ne[0] = width;
    one.ne[1] = one.ne[3] = 1;
    one.nb[1] = one.nb[2] = width * sizeof(float);
    one.nb[3] = one.nb[2] * one.ne[2];
    one.data  = buffer;
    return one;
}

void copy_heads(const ggml_tensor & from, const ggml_tensor & to, int64_t width, cudaStream_t stream) {
    CUDA_CHECK(cudaMemcpy2DAsync(to.data, to.nb[2], from.data, from.nb[2], width * sizeof(float), from.ne[2],
                                 cudaMemcpyDeviceToDevice, stream));
}

}  // namespace

bool ggml_cuda_exact_needs_host(const ggml_cgraph * cgraph) {
    return ggml_cuda_exact_enabled() && std::any_of(cgraph->nodes, cgraph->nodes + cgraph->n_nodes, needs_host);
}

void ggml_cuda_exact_begin_attention(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph) {
    ggml_cuda_exact_forget_geometry(ctx);
    attention_state & state = state_of(ctx);
    state.masks.clear();
    state.mask_of.clear();
    for (int i = 0; i < cgraph->n_nodes; i++) {
        const ggml_tensor * op = cgraph->nodes[i];
        if (is_attention(op)) {
            if (const ggml_tensor * scores = product_behind(op->src[0])) {
                state.mask_of[scores] = op->src[1];
            }
        } else if (op->op == GGML_OP_MUL_MAT && op->src[1]->op == GGML_OP_SOFT_MAX && is_attention(op->src[1])) {
            state.mask_of[op] = op->src[1]->src[1];
        }
    }
}

bool ggml_cuda_exact_flash_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    if (!ggml_cuda_exact_op(dst)) {
        return false;
    }
    if (ggml_cuda_exact_flash_attn_vec_serves(ctx.device, dst)) {
        ggml_cuda_exact_flash_attn_vec(ctx, dst);
        return true;
    }
    const ggml_tensor * mask = dst->src[3];
    if (mask == nullptr) {
        ggml_cuda_exact_note("attention without a mask: what a token would have seen alone is unknown");
        return false;
    }
    const ggml_tensor * Q    = dst->src[0];
    const host_mask &   seen = look_at(ctx, mask, Q->ne[1]);
    for (int64_t stream = 0; stream < Q->ne[3]; stream++) {
        for (int64_t query = 0; query < Q->ne[1]; query++) {
            const int64_t cells = cells_of(seen, Q->ne[1], stream, query);
            ggml_tensor   q1    = of_query(*Q, query, stream);
            ggml_tensor   k1    = of_stream(*dst->src[1], 1, cells, stream);
            ggml_tensor   v1    = of_stream(*dst->src[2], 1, cells, stream);
            ggml_tensor   mask1 = of_query(*mask, query, stream);
            mask1.ne[0] = cells;
            ggml_tensor one = *dst;  // [value, heads, queries, streams]
            one.ne[2]  = one.ne[3] = 1;
            one.src[0] = &q1;
            one.src[1] = &k1;
            one.src[2] = &v1;
            one.src[3] = &mask1;
            // in a buffer of its own: stock keeps converted keys and values behind the result
            ggml_cuda_pool_alloc<char> buffer(ctx.pool(), ggml_cuda_flash_attn_ext_get_alloc_size(ctx.device, &one) +
                                                              ggml_nbytes(&one));
            one.data = buffer.get();
            ggml_cuda_flash_attn_ext(ctx, &one);
            CUDA_CHECK(cudaMemcpyAsync((char *) dst->data + query * dst->nb[2] + stream * dst->nb[3], one.data,
                                       one.ne[0] * one.ne[1] * sizeof(float), cudaMemcpyDeviceToDevice, ctx.stream()));
        }
    }
    return true;
}

bool ggml_cuda_exact_soft_max(ggml_backend_cuda_context & ctx, ggml_tensor * dst, ggml_cuda_exact_op_t stock) {
    if (!is_attention(dst)) {
        return false;
    }
    const ggml_tensor * scores = dst->src[0];
    const ggml_tensor * mask   = dst->src[1];
    const int64_t       n_kv   = scores->ne[0];
    const host_mask &   seen   = look_at(ctx, mask, scores->ne[1]);
    ggml_cuda_pool_alloc<float> from(ctx.pool(), n_kv * scores->ne[2]);
    ggml_cuda_pool_alloc<float> to(ctx.pool(), n_kv * scores->ne[2]);
    for (int64_t stream = 0; stream < scores->ne[3]; stream++) {
        for (int64_t query = 0; query < scores->ne[1]; query++) {
            const int64_t     cells = cells_of(seen, scores->ne[1], stream, query);
            const ggml_tensor row   = of_query(*scores, query, stream);
            const ggml_tensor out   = of_query(*dst, query, stream);
            ggml_tensor       row1  = packed(row, cells, from.get());
            ggml_tensor       out1  = packed(out, cells, to.get());
            ggml_tensor       mask1 = of_query(*mask, query, stream);
            mask1.ne[0] = cells;
            copy_heads(row, row1, cells, ctx.stream());
            out1.src[0] = &row1;
            out1.src[1] = &mask1;
            stock(ctx, &out1);
            copy_heads(out1, out, cells, ctx.stream());
            if (cells < n_kv) {
                CUDA_CHECK(cudaMemset2DAsync((char *) out.data + cells * sizeof(float), out.nb[2], 0,
                                             (n_kv - cells) * sizeof(float), out.ne[2], ctx.stream()));
            }
        }
    }
    return true;
}

bool ggml_cuda_exact_attention_product(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1,
                                       ggml_tensor * dst, ggml_cuda_exact_mul_mat_t stock) {
    attention_state & state = state_of(ctx);
    const auto        found = state.mask_of.find(dst);
    if (found == state.mask_of.end() || src1->type != GGML_TYPE_F32 || dst->type != GGML_TYPE_F32) {
        ggml_cuda_exact_note("a product of two activations that is not known as attention", dst->name);
        return false;
    }
    const bool        is_values = src1->op == GGML_OP_SOFT_MAX;  // else K·Q
    const host_mask & seen      = look_at(ctx, found->second, dst->ne[1]);
    ggml_cuda_pool_alloc<float> from(ctx.pool(), src1->ne[0] * src1->ne[2]);
    ggml_cuda_pool_alloc<float> to(ctx.pool(), dst->ne[0] * dst->ne[2]);
    for (int64_t stream = 0; stream < dst->ne[3]; stream++) {
        for (int64_t query = 0; query < dst->ne[1]; query++) {
            const int64_t     cells = cells_of(seen, dst->ne[1], stream, query);
            ggml_tensor       cache = of_stream(*src0, is_values ? 0 : 1, cells, stream);
            const ggml_tensor in    = of_query(*src1, query, stream);
            const ggml_tensor out   = of_query(*dst, query, stream);
            ggml_tensor       in1   = is_values ? packed(in, cells, from.get()) : in;  // a query keeps its strides
            ggml_tensor       out1  = packed(out, is_values ? out.ne[0] : cells, to.get());
            if (is_values) {
                copy_heads(in, in1, cells, ctx.stream());
            }
            out1.src[0] = &cache;
            out1.src[1] = &in1;
            stock(ctx, &cache, &in1, &out1);
            copy_heads(out1, out, out1.ne[0], ctx.stream());
        }
    }
    return true;
}
