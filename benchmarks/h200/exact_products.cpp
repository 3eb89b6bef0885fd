// Times and checks matrix products alone: one type and shape of weights times 1 to 16 columns on the first GPU.
//
// For each width every column is compared, bit for bit, with the same column multiplied alone. Weights are copied
// until they fill more than the chip's cache, so that a pass reads them from memory.
//
// Use: exact_products TYPE K ROWS WIDTHS [ROUNDS]    (for example: exact_products q4_K 4096 12288 1,2,4,8,9,16)
// One line a width: type, k, rows, width, microseconds a product, ratio to width 1, values that differ.

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cuda.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr size_t WEIGHT_BYTES = 256u << 20;  // of all copies together
constexpr int    MAX_COPIES   = 64;

struct problem {
    ggml_backend_t             backend;
    ggml_context *             weights_context;
    ggml_backend_buffer_t      weights_buffer;
    std::vector<ggml_tensor *> copies;
    int64_t                    k;
    std::vector<float>         columns;  // 16 columns
};

struct result {
    std::vector<float> values;  // of the first copy
    double             us;      // a product
};

result run(problem & p, int first, int width, int rounds) {
    ggml_init_params params = { ggml_tensor_overhead() * (2 * p.copies.size() + 8) + ggml_graph_overhead(), nullptr, true };
    ggml_context *   context = ggml_init(params);
    ggml_tensor *    y       = ggml_new_tensor_2d(context, GGML_TYPE_F32, p.k, width);
    ggml_cgraph *    graph   = ggml_new_graph(context);
    std::vector<ggml_tensor *> outputs;
    for (ggml_tensor * w : p.copies) {
        outputs.push_back(ggml_mul_mat(context, w, y));
        ggml_build_forward_expand(graph, outputs.back());
    }
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(context, p.backend);
    ggml_backend_tensor_set(y, p.columns.data() + (int64_t) first * p.k, 0, ggml_nbytes(y));

    for (int i = 0; i < 4; i++) {
        ggml_backend_graph_compute(p.backend, graph);
    }
    std::vector<double> times;
    for (int i = 0; i < rounds; i++) {
        const auto start = std::chrono::steady_clock::now();
        ggml_backend_graph_compute(p.backend, graph);
        const auto end = std::chrono::steady_clock::now();
        times.push_back(std::chrono::duration<double, std::micro>(end - start).count() / p.copies.size());
    }
    result r;
    r.values.resize(ggml_nelements(outputs[0]));
    ggml_backend_tensor_get(outputs[0], r.values.data(), 0, ggml_nbytes(outputs[0]));
    if (!times.empty()) {
        std::sort(times.begin(), times.end());
        r.us = times[times.size() / 2];
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(context);
    return r;
}

ggml_type type_of(const std::string & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const char * known = ggml_type_name((ggml_type) i);
        if (known && name == known) {
            return (ggml_type) i;
        }
    }
    fprintf(stderr, "exact_products: no type is called '%s' (q4_K, q6_K, q8_0, f16, ...)\n", name.c_str());
    exit(EXIT_FAILURE);
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc < 5) {
        fprintf(stderr, "use: exact_products TYPE K ROWS WIDTHS [ROUNDS]\n");
        return EXIT_FAILURE;
    }
    const ggml_type type   = type_of(argv[1]);
    const int64_t   k      = atoll(argv[2]);
    const int64_t   rows   = atoll(argv[3]);
    const int       rounds = argc > 5 ? atoi(argv[5]) : 20;
    if (k % ggml_blck_size(type) != 0) {
        fprintf(stderr, "exact_products: K is no multiple of %ld\n", (long) ggml_blck_size(type));
        return EXIT_FAILURE;
    }
    problem p;
    p.k       = k;
    p.backend = ggml_backend_cuda_init(0);
    if (p.backend == nullptr) {
        fprintf(stderr, "exact_products: no CUDA device\n");
        return EXIT_FAILURE;
    }
    const size_t bytes  = ggml_row_size(type, k) * rows;
    const int    copies = std::max(1, std::min<int>(MAX_COPIES, WEIGHT_BYTES / bytes));
    ggml_init_params params = { ggml_tensor_overhead() * (copies + 1), nullptr, true };
    p.weights_context = ggml_init(params);
    for (int i = 0; i < copies; i++) {
        p.copies.push_back(ggml_new_tensor_2d(p.weights_context, type, k, rows));
    }
    p.weights_buffer = ggml_backend_alloc_ctx_tensors(p.weights_context, p.backend);
    ggml_backend_buffer_set_usage(p.weights_buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);

    std::mt19937                    random(1);
    std::normal_distribution<float> normal;
    // a few rows of noise, repeated: quantizing all would take longer than measuring
    const int64_t      some = std::min<int64_t>(rows, 64);
    std::vector<float> noise(some * k);
    for (float & v : noise) {
        v = normal(random) / std::sqrt((float) k);
    }
    std::vector<char> quantized(ggml_row_size(type, k) * some);
    if (type == GGML_TYPE_F32) {
        memcpy(quantized.data(), noise.data(), quantized.size());
    } else {
        ggml_quantize_chunk(type, noise.data(), quantized.data(), 0, some, k, nullptr);
    }
    std::vector<char> all(bytes);
    for (size_t at = 0; at < bytes; at += quantized.size()) {
        memcpy(all.data() + at, quantized.data(), std::min(quantized.size(), bytes - at));
    }
    for (ggml_tensor * w : p.copies) {
        ggml_backend_tensor_set(w, all.data(), 0, bytes);
    }
    p.columns.resize(16 * k);
    for (float & v : p.columns) {
        v = normal(random);
    }

    std::vector<std::vector<float>> alone;
    for (int i = 0; i < 16; i++) {
        alone.push_back(run(p, i, 1, 0).values);
    }
    double            one = 0;
    std::stringstream widths(argv[4]);
    for (std::string word; std::getline(widths, word, ',');) {
        const int width = atoi(word.c_str());
        if (width < 1 || width > 16) {
            fprintf(stderr, "exact_products: width %s, wanted 1 to 16\n", word.c_str());
            return EXIT_FAILURE;
        }
        const result r    = run(p, 0, width, rounds);
        int64_t      differ = 0;
        for (int j = 0; j < width; j++) {
            for (int64_t i = 0; i < rows; i++) {
                differ += memcmp(&r.values[j * rows + i], &alone[j][i], sizeof(float)) != 0;
            }
        }
        if (width == 1) {
            one = r.us;
        }
        printf("%-6s k %6ld rows %7ld width %2d  %9.2f us  %6.3f  differ %ld of %ld\n", argv[1], (long) k, (long) rows,
               width, r.us, one > 0 ? r.us / one : 0.0, (long) differ, (long) (width * rows));
        fflush(stdout);
    }
    return EXIT_SUCCESS;
}
