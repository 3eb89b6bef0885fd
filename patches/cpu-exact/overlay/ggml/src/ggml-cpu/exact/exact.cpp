// See exact.h. This file holds the switch, the report and the drivers; the kernels are in exact-kernels.cpp.

#include "exact.h"
#include "exact-kernels.h"

#include "ggml-backend-impl.h"
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "repack.h"
#include "traits.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace {

constexpr int     MAX_TOKENS = 16;
constexpr int64_t CACHE_ROWS = 32 * 1024;  // bytes of weights that stay in the first cache level while columns pass by

// ---- switch ----

int read_switch() {
    const char * value = getenv("GGML_CPU_EXACT");
    if (value == nullptr || strcmp(value, "1") == 0) {
        return 1;
    }
    if (strcmp(value, "0") == 0) {
        return 0;
    }
    fprintf(stderr, "GGML_CPU_EXACT: found '%s', wanted 0 (stock behaviour) or 1 (exact batches, the default)\n", value);
    exit(EXIT_FAILURE);
}

bool enabled() {
    static const bool on = read_switch() == 1;
    return on;
}

// ---- report ----

struct report_state {
    std::mutex                                 mutex;
    std::set<std::pair<std::string, std::string>> seen;
    std::deque<std::string>                    texts;  // every text ever handed out: pointers to it stay valid
};

report_state & report() {
    static report_state * state = new report_state();  // never destroyed: threads may still run when the process ends
    return *state;
}

// ---- what a pass is ----

// Tokens in the pass that an op belongs to, as far as the op's shape tells; 0 where it does not
int64_t tokens_of(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_MUL_MAT:
            // weights: {k, tokens, 1, 1}; attention: {k, tokens of a stream, heads, streams}
            return op->src[1]->ne[1] * op->src[1]->ne[3];
        case GGML_OP_MUL_MAT_ID:
            return op->src[2]->ne[1];
        case GGML_OP_FLASH_ATTN_EXT:
            return op->src[0]->ne[1] * op->src[0]->ne[3];
        default:
            return 0;
    }
}

bool is_weight(const ggml_tensor * t) {
    const ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    return buffer != nullptr && buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

// One weight matrix over activations of more than two dimensions (recurrent models, projections per head): which of
// the dimensions is the token cannot be read from the shape, so such an op stays with stock and is reported
bool is_ambiguous(const ggml_tensor * op) {
    const ggml_tensor * src1 = op->src[1];
    return op->op == GGML_OP_MUL_MAT && src1->ne[2] * src1->ne[3] > 1 && op->src[0]->ne[2] == 1 &&
           op->src[0]->ne[3] == 1 && is_weight(op->src[0]);
}

// True for ops that compute every row of their output from the matching rows of their inputs alone, in an order that
// depends neither on how many rows there are nor on how many threads
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
        case GGML_OP_SUM_ROWS:
        case GGML_OP_ROPE:
        case GGML_OP_SOFT_MAX:
        case GGML_OP_ARGSORT:
        case GGML_OP_ARGMAX:
        case GGML_OP_TOP_K:
            return true;
        default:
            return false;
    }
}

// Another engine inside the CPU backend (AMX, KleidiAI, ...) that takes this op, or null
const char * foreign_engine(const ggml_tensor * op) {
    for (auto * buft : ggml_backend_cpu_get_extra_buffer_types()) {
        if (buft == nullptr || buft->context == nullptr) {
            continue;
        }
#ifdef GGML_USE_CPU_REPACK
        if (buft == ggml_backend_cpu_repack_buffer_type()) {
            continue;
        }
#endif
        if (((ggml::cpu::extra_buffer_type *) buft->context)->get_tensor_traits(op) != nullptr) {
            return ggml_backend_buft_name(buft);
        }
    }
    return nullptr;
}

// A query's own pass puts its tokens into cells 0, 1, 2, ... That is known only if the cells that it sees are one run
// from cell 0. A sliding window, or one cache shared by several sequences, breaks it
template <typename T> bool is_one_run(const T * mask, int64_t n, T minus_infinity) {
    int64_t i = 0;
    while (i < n && mask[i] != minus_infinity) {
        i++;
    }
    if (i == 0) {
        // sees nothing (a padded row), or begins later
        while (i < n && mask[i] == minus_infinity) {
            i++;
        }
        return i == n;
    }
    for (; i < n; i++) {
        if (mask[i] != minus_infinity) {
            return false;
        }
    }
    return true;
}

void inspect_mask(const ggml_tensor * mask, int64_t n_queries) {
    if (mask == nullptr) {
        ggml_cpu_exact_note("attention without a mask: what a token would have seen alone is unknown", nullptr);
        return;
    }
    if (mask->data == nullptr || mask->op != GGML_OP_NONE) {
        // computed inside the graph: its values are not there yet
        ggml_cpu_exact_note("attention mask computed in the graph: its layout could not be looked at", nullptr);
        return;
    }
    const int64_t rows = std::min(n_queries, mask->ne[1]);
    for (int64_t i3 = 0; i3 < mask->ne[3]; i3++) {
        for (int64_t i1 = 0; i1 < rows; i1++) {
            const char * row = (const char *) mask->data + i3 * mask->nb[3] + i1 * mask->nb[1];
            const bool   ok  = mask->type == GGML_TYPE_F16 ?
                is_one_run((const ggml_fp16_t *) row, mask->ne[0], (ggml_fp16_t) 0xfc00) :
                is_one_run((const float *) row, mask->ne[0], -INFINITY);
            if (!ok) {
                ggml_cpu_exact_note(
                    "the KV cells a token sees are not one run from cell 0 (sliding window, or one cache shared by "
                    "several sequences): the order that it would have had alone is unknown", nullptr);
                return;
            }
        }
    }
}

}  // namespace

// ---- exported ----

extern "C" int ggml_cpu_exact_enabled(void) {
    return enabled() ? 1 : 0;
}

extern "C" int ggml_cpu_exact_max_tokens(void) {
    return MAX_TOKENS;
}

extern "C" const char * ggml_cpu_exact_report(void) {
    report_state &              state = report();
    std::lock_guard<std::mutex> lock(state.mutex);
    return state.texts.empty() ? "" : state.texts.back().c_str();
}

// ---- asked by the backend ----

extern "C" void ggml_cpu_exact_init(void) {
    enabled();
}

extern "C" void ggml_cpu_exact_note(const char * what, const char * detail) {
    report_state &              state = report();
    std::lock_guard<std::mutex> lock(state.mutex);
    if (!state.seen.emplace(what, detail ? detail : "").second) {
        return;
    }
    std::string line = what;
    if (detail) {
        line += ": ";
        line += detail;
    }
    state.texts.push_back(state.texts.empty() ? line : state.texts.back() + "\n" + line);
    GGML_LOG_WARN("cpu-exact: not kept exact: %s\n", line.c_str());
}

extern "C" bool ggml_cpu_exact_op(const struct ggml_tensor * op) {
    if (!enabled()) {
        return false;
    }
    const int64_t tokens = tokens_of(op);
    return tokens >= 2 && tokens <= MAX_TOKENS && !is_ambiguous(op);
}

extern "C" bool ggml_cpu_exact_op_differs(const struct ggml_tensor * op) {
    return ggml_cpu_exact_op(op) && !exact_stock_keeps_order(op->src[0]->type);
}

extern "C" bool ggml_cpu_exact_op_differs_repacked(const struct ggml_tensor * op, int64_t inter, int64_t group) {
    return ggml_cpu_exact_op(op) && !exact_stock_keeps_order_repacked(op->src[0]->type, inter, group);
}

extern "C" void ggml_cpu_exact_inspect(const struct ggml_cgraph * cgraph, int n_threads) {
    if (!enabled()) {
        return;
    }

    // The widest op tells what the pass is. In a language model all agree, but for the last ones, which see only the rows
    // whose logits are asked for
    int64_t widest        = 0;
    int64_t positions     = 0;
    bool    attends_alone = false;
    for (int i = 0; i < cgraph->n_nodes; i++) {
        const ggml_tensor * node   = cgraph->nodes[i];
        const int64_t       tokens = tokens_of(node);
        widest                     = std::max(widest, tokens);
        attends_alone              = attends_alone || (tokens == 1 && node->op == GGML_OP_FLASH_ATTN_EXT);
        if (node->op == GGML_OP_ROPE) {
            positions = std::max(positions, node->src[0]->ne[2] * node->src[0]->ne[3]);
        }
    }
    if (positions == 1 && widest >= 2 && widest <= MAX_TOKENS) {
        // a product per head, with the heads where the tokens are in all others
        ggml_cpu_exact_note("a matrix product with several rows in a pass of one token: its bits may not be stock's", nullptr);
        return;
    }

    // Flash attention of one token is split over the threads, so its bits belong to their number
    static std::atomic<int> threads_alone{ 0 };
    if (widest == 1 && attends_alone) {
        threads_alone.store(n_threads, std::memory_order_relaxed);
    }
    if (widest < 2 || widest > MAX_TOKENS) {
        return;
    }
    const int alone = threads_alone.load(std::memory_order_relaxed);

    const ggml_tensor * last_mask = nullptr;
    for (int i = 0; i < cgraph->n_nodes; i++) {
        const ggml_tensor * node = cgraph->nodes[i];
        if (ggml_is_empty(node) || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
            continue;
        }
        const ggml_tensor * mask = nullptr;
        switch (node->op) {
            case GGML_OP_MUL_MAT:
            case GGML_OP_MUL_MAT_ID:
                if (const char * engine = foreign_engine(node)) {
                    ggml_cpu_exact_note("matrix products of another engine inside the CPU backend", engine);
                } else if (is_ambiguous(node)) {
                    ggml_cpu_exact_note("one weight matrix over activations of three or more dimensions: which of them is the token is unknown", nullptr);
                }
                continue;
            case GGML_OP_FLASH_ATTN_EXT:
                if (alone != 0 && alone != n_threads) {
                    ggml_cpu_exact_note("flash attention with one number of threads for a token alone and another for "
                                        "a batch (n_threads, n_threads_batch)", nullptr);
                }
                mask = node->src[3];
                break;
            case GGML_OP_SOFT_MAX:
                if (node->src[1] == nullptr) {
                    continue;  // not attention (expert weights, for one)
                }
                mask = node->src[1];
                break;
            default:
                if (!is_row_wise(node)) {
                    ggml_cpu_exact_note("an operation whose order was not examined", ggml_op_name(node->op));
                }
                continue;
        }
        if (mask != last_mask || mask == nullptr) {
            last_mask = mask;
            inspect_mask(mask, node->src[0]->ne[1]);
        }
    }

#if !defined(__x86_64__) && !defined(_M_X64) && !defined(__aarch64__) && !defined(_M_ARM64)
    ggml_cpu_exact_note("an instruction set on which this patch was not examined", nullptr);
#endif
}

// ---- drivers ----

extern "C" void ggml_cpu_exact_mul_mat(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];

    GGML_TENSOR_BINARY_OP_LOCALS

    const auto *    traits    = ggml_get_type_traits_cpu(src0->type);
    const ggml_type col_type  = traits->vec_dot_type;
    const size_t    col_size  = ggml_row_size(col_type, ne10);
    const bool      converted = src1->type != col_type;
    const int64_t   r2        = ne12 / ne02;
    const int64_t   r3        = ne13 / ne03;

    // Heads that share one matrix (grouped queries) are further columns of it
    const int64_t n_cols   = ne11 * r2;
    const int64_t n_planes = ne02 * ne13;

    // Chunks of rows: enough for every thread to find some, few enough that taking one costs nothing
    const int64_t wanted   = std::max<int64_t>(1, 4 * params->nth / n_planes);
    int64_t       per_row  = (ne01 + wanted - 1) / wanted;
    per_row                = std::max<int64_t>(16, (per_row + 15) / 16 * 16);
    const int64_t n_chunks = (ne01 + per_row - 1) / per_row;

    const exact_dot_kernel kernel = exact_dot_kernel_for(src0->type);

    constexpr int MAX_COLS = 64;
    const char *  cols[MAX_COLS];
    float *       outs[MAX_COLS];

    int chunk = params->ith;
    while (chunk < n_chunks * n_planes) {
        const int64_t plane = chunk / n_chunks;
        const int64_t row0  = (chunk % n_chunks) * per_row;
        const int64_t row1  = std::min(row0 + per_row, ne01);
        const int64_t i02   = plane % ne02;
        const int64_t i13   = plane / ne02;

        const char * rows = (const char *) src0->data + i02 * nb02 + (i13 / r3) * nb03 + row0 * nb01;

        for (int64_t c0 = 0; c0 < n_cols; c0 += MAX_COLS) {
            const int n = (int) std::min<int64_t>(MAX_COLS, n_cols - c0);
            for (int c = 0; c < n; c++) {
                const int64_t i11 = (c0 + c) % ne11;
                const int64_t i12 = i02 * r2 + (c0 + c) / ne11;
                cols[c] = converted ? (const char *) params->wdata + (i11 + i12 * ne11 + i13 * ne12 * ne11) * col_size :
                                      (const char *) src1->data + i11 * nb11 + i12 * nb12 + i13 * nb13;
                outs[c] = (float *) ((char *) dst->data + i11 * nb1 + i12 * nb2 + i13 * nb3) + row0;
            }
            kernel(traits->vec_dot, ne00, rows, nb01, row1 - row0, cols, outs, n);
        }

        chunk = ggml_threadpool_chunk_add(params->threadpool, 1);
    }
}

extern "C" void ggml_cpu_exact_mul_mat_repacked(enum ggml_type type, int64_t inter, int64_t group,
                                                ggml_cpu_exact_gemv_t gemv, int64_t k, const char * weights,
                                                size_t row_size, int64_t n_rows, const char * cols, size_t col_size,
                                                int64_t n_cols, char * dst, size_t dst_stride) {
    const exact_repacked_kernel kernel = exact_repacked_kernel_for(type, inter, group, gemv);
    if (kernel) {
        kernel(k, weights, row_size, n_rows, cols, col_size, n_cols, dst, dst_stride);
        return;
    }

    // No kernel of ours: pass the columns one by one over a few rows at a time, so that those stay in the cache
    const int64_t step = std::max<int64_t>(1, CACHE_ROWS / (int64_t) row_size / group) * group;
    for (int64_t row = 0; row < n_rows; row += step) {
        const int64_t n = std::min(step, n_rows - row);
        for (int64_t c = 0; c < n_cols; c++) {
            gemv((int) k, (float *) (dst + c * dst_stride) + row, n_rows, weights + row * row_size,
                 cols + c * col_size, 1, (int) n);
        }
    }
}
