// The shim: the part of llama.cpp that a measurement needs, as plain scalars and pointers.
//
// It is compiled against each build's own llama.h, so that a moved struct field is a compile
// error and not silent garbage. Python loads it with ctypes (routewise/engine.py). One build per
// process: two builds share their SONAMEs, and the second one loaded would measure the first.

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

#include <chrono>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#ifndef ROUTEWISE_IDENTITY
#error "ROUTEWISE_IDENTITY must hold the digest of the build that this shim belongs to"
#endif

#define RW_API extern "C" __attribute__((visibility("default")))

namespace {

std::mutex  log_mutex;
std::string log_text;

// what the engine says about itself is a reading (which attention, which buffers), so it is kept
void keep_log(enum ggml_log_level level, const char * text, void * user) {
    (void) user;
    if (level == GGML_LOG_LEVEL_DEBUG) {
        return;
    }
    const std::lock_guard<std::mutex> guard(log_mutex);
    if (log_text.size() < (1u << 20)) {
        log_text += text;
    }
}

// -1 where no type has this name
int type_by_name(const char * name) {
    for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
        const char * known = ggml_type_name(static_cast<ggml_type>(type));
        if (known != nullptr && std::strcmp(known, name) == 0) {
            return type;
        }
    }
    return -1;
}

} // namespace

RW_API const char * rw_identity(void) {
    return ROUTEWISE_IDENTITY;
}

RW_API const char * rw_system_info(void) {
    return llama_print_system_info();
}

RW_API void rw_start(void) {
    llama_log_set(keep_log, nullptr);
    llama_backend_init();
}

// Copies what was logged since the last call, at most capacity - 1 bytes and a zero. Returns the
// number of bytes that were there.
RW_API int64_t rw_take_log(char * buffer, int64_t capacity) {
    const std::lock_guard<std::mutex> guard(log_mutex);
    const int64_t n_bytes = static_cast<int64_t>(log_text.size());
    if (capacity > 0) {
        const int64_t n_copied = n_bytes < capacity - 1 ? n_bytes : capacity - 1;
        std::memcpy(buffer, log_text.data(), static_cast<size_t>(n_copied));
        buffer[n_copied] = '\0';
    }
    log_text.clear();
    return n_bytes;
}

// ---- bandwidth

// Copies n_bytes within the memory of the processor, or of the first device, n_rounds times after a
// warm-up. ns gets the time of each. Returns 0, or what could not be had: 1 a device, 2 its memory.
RW_API int32_t rw_time_copy(int32_t on_device, int64_t n_bytes, int32_t n_threads, int32_t n_rounds, int64_t * ns) {
    const ggml_backend_dev_t device =
        ggml_backend_dev_by_type(on_device ? GGML_BACKEND_DEVICE_TYPE_GPU : GGML_BACKEND_DEVICE_TYPE_CPU);
    const ggml_backend_t backend = device == nullptr ? nullptr : ggml_backend_dev_init(device, nullptr);
    if (backend == nullptr) {
        return 1;
    }
    const auto set_n_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads"));
    if (set_n_threads != nullptr) {
        set_n_threads(backend, n_threads);
    }
    ggml_init_params params{};
    params.mem_size             = 16 * ggml_tensor_overhead() + ggml_graph_overhead();
    params.no_alloc             = true;
    ggml_context *        held  = ggml_init(params);
    ggml_tensor *         from  = ggml_new_tensor_2d(held, GGML_TYPE_F32, 1024, n_bytes / 4096);
    ggml_tensor *         to    = ggml_new_tensor_2d(held, GGML_TYPE_F32, 1024, n_bytes / 4096);
    ggml_cgraph *         graph = ggml_new_graph(held);
    ggml_build_forward_expand(graph, ggml_cpy(held, from, to));
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(held, backend);
    if (buffer != nullptr) {
        ggml_backend_buffer_clear(buffer, 1);
        for (int32_t round = -2; round < n_rounds; ++round) {
            const auto start = std::chrono::steady_clock::now();
            ggml_backend_graph_compute(backend, graph);
            ggml_backend_synchronize(backend);
            const auto end = std::chrono::steady_clock::now();
            if (round >= 0) {
                ns[round] = std::chrono::duration_cast<std::chrono::nanoseconds>(end - start).count();
            }
        }
        ggml_backend_buffer_free(buffer);
    }
    ggml_free(held);
    ggml_backend_free(backend);
    return buffer == nullptr ? 2 : 0;
}

// ---- model

// Without layers for a device there is none: a build with a device's backend would give it large
// products and the KV cache all the same.
RW_API void * rw_model_open(const char * path, int32_t n_gpu_layers) {
    ggml_backend_dev_t no_device[] = {nullptr};
    llama_model_params params      = llama_model_default_params();
    params.n_gpu_layers            = n_gpu_layers;
    params.devices                 = n_gpu_layers == 0 ? no_device : nullptr;
    return llama_model_load_from_file(path, params);
}

RW_API void rw_model_close(void * model) {
    llama_model_free(static_cast<llama_model *>(model));
}

RW_API int32_t rw_n_vocab(const void * model) {
    return llama_vocab_n_tokens(llama_model_get_vocab(static_cast<const llama_model *>(model)));
}

RW_API int32_t rw_n_ctx_train(const void * model) {
    return llama_model_n_ctx_train(static_cast<const llama_model *>(model));
}

RW_API int32_t rw_description(const void * model, char * buffer, int32_t capacity) {
    return llama_model_desc(static_cast<const llama_model *>(model), buffer, static_cast<size_t>(capacity));
}

// Returns the number of tokens, or minus the number that would have been needed.
RW_API int32_t rw_tokenize(const void * model, const char * text, int32_t n_bytes, int32_t * tokens,
                           int32_t capacity, int32_t add_special, int32_t parse_special) {
    return llama_tokenize(llama_model_get_vocab(static_cast<const llama_model *>(model)), text, n_bytes, tokens,
                          capacity, add_special != 0, parse_special != 0);
}

// ---- context

// n_ctx_seq is the context of each sequence; sequences share cells only where kv_unified. flash_attention is 0 or
// 1, never 'auto': what moves a number is said. Returns NULL where the engine refuses.
RW_API void * rw_context_open(void * model, int32_t n_ctx_seq, int32_t n_seq_max, int32_t n_batch, int32_t n_ubatch,
                              int32_t n_threads, int32_t flash_attention, int32_t kv_unified, const char * kv_type) {
    const int type = type_by_name(kv_type);
    if (type < 0) {
        return nullptr;
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx                = static_cast<uint32_t>(n_ctx_seq) * static_cast<uint32_t>(n_seq_max);
    params.n_batch              = static_cast<uint32_t>(n_batch);
    params.n_ubatch             = static_cast<uint32_t>(n_ubatch);
    params.n_seq_max            = static_cast<uint32_t>(n_seq_max);
    params.n_threads            = n_threads;
    params.n_threads_batch      = n_threads; // attention may split its sum by the number of threads
    params.flash_attn_type      = flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k               = static_cast<ggml_type>(type);
    params.type_v               = static_cast<ggml_type>(type);
    params.kv_unified           = kv_unified != 0;
    params.no_perf              = true;
    return llama_init_from_model(static_cast<llama_model *>(model), params);
}

RW_API void rw_context_close(void * context) {
    llama_free(static_cast<llama_context *>(context));
}

RW_API int32_t rw_context_n_ctx_seq(const void * context) {
    return static_cast<int32_t>(llama_n_ctx_seq(static_cast<const llama_context *>(context)));
}

RW_API int32_t rw_context_n_ubatch(const void * context) {
    return static_cast<int32_t>(llama_n_ubatch(static_cast<const llama_context *>(context)));
}

RW_API int32_t rw_context_n_threads(void * context) {
    return llama_n_threads(static_cast<llama_context *>(context));
}

RW_API int32_t rw_context_n_threads_batch(void * context) {
    return llama_n_threads_batch(static_cast<llama_context *>(context));
}

// One pass over n tokens, each of one sequence. wants[i] != 0 asks for the logits of token i.
// Returns llama_decode's code: 0, or the reason why not. pass_ns, where not NULL, gets the time of
// the pass up to the moment where its logits are there.
RW_API int32_t rw_decode(void * context, int32_t n, int32_t * tokens, int32_t * positions, const int32_t * sequences,
                         int8_t * wants, int64_t * pass_ns) {
    std::vector<int32_t>        n_seq_id(static_cast<size_t>(n), 1);
    std::vector<llama_seq_id>   ids(sequences, sequences + n);
    std::vector<llama_seq_id *> seq_id(static_cast<size_t>(n));
    for (int32_t i = 0; i < n; ++i) {
        seq_id[i] = &ids[i];
    }
    llama_batch batch{};
    batch.n_tokens = n;
    batch.token    = tokens;
    batch.pos      = positions;
    batch.n_seq_id = n_seq_id.data();
    batch.seq_id   = seq_id.data();
    batch.logits   = wants;

    llama_context * llama = static_cast<llama_context *>(context);
    const auto      start = std::chrono::steady_clock::now();
    const int32_t   code  = llama_decode(llama, batch);
    llama_synchronize(llama);
    const auto end = std::chrono::steady_clock::now();
    if (pass_ns != nullptr) {
        *pass_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(end - start).count();
    }
    return code;
}

// The row of token i of the last pass: n_vocab floats that stay valid until the next pass.
RW_API const float * rw_logits(void * context, int32_t i) {
    return llama_get_logits_ith(static_cast<llama_context *>(context), i);
}

// Removes positions [first, end) of a sequence from the cache; end < 0 means all that follow.
RW_API int32_t rw_remove(void * context, int32_t sequence, int32_t first, int32_t end) {
    return llama_memory_seq_rm(llama_get_memory(static_cast<llama_context *>(context)), sequence, first, end) ? 1 : 0;
}
