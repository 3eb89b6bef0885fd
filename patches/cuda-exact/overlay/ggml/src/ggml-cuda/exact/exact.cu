// See exact.cuh. This file holds the switch, the report, the look at each graph and the products that are done column
// by column or in stock's own kernels; the kernels of ours are in exact-mmvq.cu and exact-attn.cu.

#include "exact.cuh"

#include "../mmvf.cuh"
#include "../mmvq.cuh"
#include "ggml-impl.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace {

// ---- switch ----

int read_switch() {
    const char * value = getenv("GGML_CUDA_EXACT");
    if (value == nullptr || strcmp(value, "1") == 0) {
        return 1;
    }
    if (strcmp(value, "0") == 0) {
        return 0;
    }
    fprintf(stderr, "GGML_CUDA_EXACT: found '%s', wanted 0 (stock behaviour) or 1 (exact batches, the default)\n", value);
    exit(EXIT_FAILURE);
}

bool enabled() {
    static const bool on = read_switch() == 1;
    return on;
}

// ---- report ----

struct report_state {
    std::mutex                                    mutex;
    std::set<std::pair<std::string, std::string>> seen;
    std::deque<std::string>                       texts;  // every text ever handed out: pointers to it stay valid
};

report_state & report() {
    static report_state * state = new report_state();  // never destroyed: threads may still run when the process ends
    return *state;
}

// ---- what a pass is ----

bool in_range(int64_t n) {
    return n >= 2 && n <= EXACT_MAX_TOKENS;
}

bool is_weight(const ggml_tensor * t) {
    const ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    return buffer != nullptr && ggml_backend_buffer_get_usage(buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

// Tokens in the pass that an op belongs to, as far as the op's shape tells; 0 where it does not
int64_t tokens_of(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_MUL_MAT:
            // weights: {k, tokens, 1, 1}; attention: {k, tokens of a stream, heads, streams}
            return op->src[1]->ne[1] * op->src[1]->ne[3];
        case GGML_OP_MUL_MAT_ID:
            return op->src[2]->ne[1];
        case GGML_OP_FLASH_ATTN_EXT:
        case GGML_OP_SOFT_MAX:
            return op->src[0]->ne[1] * op->src[0]->ne[3];
        default:
            return 0;
    }
}

// One weight matrix over activations of more than two dimensions (recurrent models, projections per head): which of
// the dimensions is the token cannot be read from the shape, so such an op stays with stock and is reported
bool is_ambiguous(const ggml_tensor * op) {
    const ggml_tensor * src1 = op->src[1];
    return op->op == GGML_OP_MUL_MAT && src1->ne[2] * src1->ne[3] > 1 && op->src[0]->ne[2] == 1 &&
           op->src[0]->ne[3] == 1 && is_weight(op->src[0]);
}

// True for ops that compute every row of their output from the matching rows of their inputs alone, in an order that
// does not depend on how many rows there are
bool is_row_wise(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
        case GGML_OP_DUP:
        case GGML_OP_CPY:
        case GGML_OP_CONT:
        case GGML_OP_CONCAT:
        case GGML_OP_REPEAT:
        case GGML_OP_GET_ROWS:
        case GGML_OP_SET_ROWS:
        case GGML_OP_ADD:
        case GGML_OP_ADD1:
        case GGML_OP_ADD_ID:
        case GGML_OP_SUB:
        case GGML_OP_MUL:
        case GGML_OP_DIV:
        case GGML_OP_SQR:
        case GGML_OP_SQRT:
        case GGML_OP_SCALE:
        case GGML_OP_CLAMP:
        case GGML_OP_UNARY:
        case GGML_OP_GLU:
        case GGML_OP_NORM:
        case GGML_OP_RMS_NORM:
        case GGML_OP_L2_NORM:
        case GGML_OP_ROPE:
        case GGML_OP_SUM_ROWS:  // other threads only from two rows per multiprocessor
        case GGML_OP_ARGSORT:
        case GGML_OP_ARGMAX:
        case GGML_OP_TOP_K:
            return true;
        default:
            return false;
    }
}

// Tokens first to first + n - 1 of a tensor, along one of its dimensions, as a tensor of their own
ggml_tensor slice_of(const ggml_tensor & t, int dimension, int64_t first, int64_t n = 1) {
    ggml_tensor slice   = t;
    slice.ne[dimension] = n;
    slice.data          = (char *) t.data + first * t.nb[dimension];
    return slice;
}

}  // namespace

// ---- exported ----

extern "C" int ggml_cuda_exact_enabled(void) {
    return enabled() ? 1 : 0;
}

extern "C" int ggml_cuda_exact_max_tokens(void) {
    return EXACT_MAX_TOKENS;
}

extern "C" const char * ggml_cuda_exact_report(void) {
    if (ggml_cuda_exact_gaps_seen()) {
        ggml_cuda_exact_note("the KV cells a token sees are not one run from cell 0 (sliding window, or one cache shared "
                             "by several sequences): the split that it would have had alone is unknown");
    }
    report_state &              state = report();
    std::lock_guard<std::mutex> lock(state.mutex);
    return state.texts.empty() ? "" : state.texts.back().c_str();
}

// ---- asked by the backend ----

void ggml_cuda_exact_note(const char * what, const char * detail) {
    report_state &              state = report();
    std::lock_guard<std::mutex> lock(state.mutex);
    if (!state.seen.emplace(what, detail ? detail : "").second) {
        return;
    }
    const std::string line = std::string(what) + (detail ? std::string(": ") + detail : "");
    state.texts.push_back(state.texts.empty() ? line : state.texts.back() + "\n" + line);
    GGML_LOG_WARN("exact batches: not exact: %s\n", line.c_str());
}

bool ggml_cuda_exact_op(const ggml_tensor * op) {
    return enabled() && in_range(tokens_of(op)) && !is_ambiguous(op);
}

void ggml_cuda_exact_begin(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph) {
    if (!enabled()) {
        return;
    }
    if (ggml_cuda_exact_gaps_seen()) {
        ggml_cuda_exact_report();  // the note is logged at the next pass
    }
    ggml_cuda_exact_begin_attention(ctx, cgraph);
    ggml_cuda_exact_forget_activations(ctx);

    bool in_pass = false;  // some op of the graph has a shape that tells of 2 to 16 tokens
    for (int i = 0; i < cgraph->n_nodes && !in_pass; i++) {
        in_pass = in_range(tokens_of(cgraph->nodes[i]));
    }
    if (!in_pass) {
        return;
    }
    for (int i = 0; i < cgraph->n_nodes; i++) {
        const ggml_tensor * op = cgraph->nodes[i];
        if (op->op == GGML_OP_MUL_MAT && is_ambiguous(op)) {
            ggml_cuda_exact_note("one weight matrix over activations of three or more dimensions", op->src[0]->name);
        } else if (tokens_of(op) == 0 && !is_row_wise(op)) {
            ggml_cuda_exact_note("an operation whose order was not examined", ggml_op_name(op->op));
        }
    }
}

bool ggml_cuda_exact_mul_mat(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1,
                             ggml_tensor * dst, ggml_cuda_exact_mul_mat_t stock) {
    if (dst->op != GGML_OP_MUL_MAT || !enabled() || !in_range(src1->ne[1] * src1->ne[3]) || is_ambiguous(dst)) {
        return false;
    }
    if (src0->ne[2] * src0->ne[3] > 1 || src1->ne[2] * src1->ne[3] > 1 || !is_weight(src0)) {
        return ggml_cuda_exact_attention_product(ctx, src0, src1, dst, stock);
    }
    if (ggml_cuda_exact_mul_mat_vec_q(ctx, src0, src1, dst)) {
        return true;
    }
    // stock's vector kernel for floats sums each of up to eight columns as it sums one
    const int  cc      = ggml_cuda_info().devices[ctx.device].cc;
    const bool several = src1->type == GGML_TYPE_F32 && dst->type == GGML_TYPE_F32 &&
                         ggml_cuda_should_use_mmvf(src0->type, cc, src0->ne, src0->nb, 1);
    const int64_t step = several ? MMVF_MAX_BATCH_SIZE : 1;
    for (int64_t first = 0; first < dst->ne[1]; first += step) {
        const int64_t n      = std::min(step, dst->ne[1] - first);
        ggml_tensor   src1_n = slice_of(*src1, 1, first, n);
        ggml_tensor   dst_n  = slice_of(*dst, 1, first, n);
        dst_n.src[1]         = &src1_n;
        if (several) {
            ggml_cuda_mul_mat_vec_f(ctx, src0, &src1_n, nullptr, &dst_n);
        } else {
            stock(ctx, src0, &src1_n, &dst_n);
        }
    }
    return true;
}

bool ggml_cuda_exact_mul_mat_id(ggml_backend_cuda_context & ctx, ggml_tensor * dst, ggml_cuda_exact_op_t stock) {
    if (!ggml_cuda_exact_op(dst)) {
        return false;
    }
    for (int64_t token = 0; token < dst->ne[2]; token++) {
        ggml_tensor src1_n = slice_of(*dst->src[1], 2, token);
        ggml_tensor ids_n  = slice_of(*dst->src[2], 1, token);
        ggml_tensor dst_n  = slice_of(*dst, 2, token);
        dst_n.src[1]       = &src1_n;
        dst_n.src[2]       = &ids_n;
        stock(ctx, &dst_n);
    }
    return true;
}
