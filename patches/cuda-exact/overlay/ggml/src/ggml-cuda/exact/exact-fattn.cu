// Flash attention of 2 to 16 queries, each with the split of the KV cells that it would have alone.
//
// Stock gives one query of one sequence to its vector kernel: as many blocks as keep the chip busy walk the cells, 128
// at a time in turn, and their results are then joined in order. How many blocks follows from the number of cells, and
// that from the token's position. Cells that a query does not see add exact zeros. So what a batch moves is only the
// number of blocks, and here every query has its own: a first kernel counts the cells that the mask shows to each query
// and applies stock's rule, then stock's vector kernel, compiled here a second time, runs with those numbers.
//
// All of it happens on the device, so that a CUDA graph that is replayed with another mask stays right.

#include "exact.cuh"

#include "../fattn-common.cuh"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <vector>

// ---- stock's vector kernel with a number of blocks for each query ----

// KV_max_ptr, which stock uses to skip cells at the end, holds for each query of each sequence the cells to walk, and
// behind these the number of blocks
static __device__ __forceinline__ int exact_parts_of(const int * geometry, const int n_heads, const int n_sequences) {
    return geometry[gridDim.x * n_sequences + (blockIdx.z / n_heads) * gridDim.x + blockIdx.x];
}

// Once as stock compiles it, to ask how many of its blocks a multiprocessor holds, and once with our numbers
namespace exact_stock {
#include "../fattn-vec.cuh"
}
#undef FATTN_VEC_PARTS
#undef FATTN_VEC_BEGIN
#define FATTN_VEC_PARTS n_parts
#define FATTN_VEC_BEGIN \
    const int n_parts = exact_parts_of(KV_max_ptr, ne02, ne03); \
    if (int(blockIdx.y) >= n_parts) { \
        return; \
    }
namespace exact_vec {
#include "../fattn-vec.cuh"
}

namespace {

// Stock's rule (launch_fattn) for one query of one sequence: n_kv cells, n_heads heads, tiles of `tile` cells, `per_sm`
// blocks a multiprocessor at once
static __host__ __device__ int parts_alone(const int n_kv, const int n_heads, const int tile, const int per_sm, const int n_sm) {
    const int n_tiles = (n_kv + tile - 1) / tile;
    const int a_wave  = n_sm * per_sm;
    int parts           = per_sm < n_tiles ? per_sm : n_tiles;
    int waves_best      = 0;
    int efficiency_best = 0;
    for (int test = parts; test <= n_tiles; ++test) {
        const int n_blocks   = n_heads * test;
        const int waves      = (n_blocks + a_wave - 1) / a_wave;
        const int efficiency = 100 * n_blocks / (waves * a_wave);
        if (efficiency_best >= 95 && waves > waves_best) {
            break;
        }
        if (efficiency > efficiency_best) {
            waves_best      = waves;
            efficiency_best = efficiency;
            parts           = test;
        }
    }
    return parts;
}

// The cells that a token would have had alone: the cache is padded to multiples of this
constexpr int KV_PADDING = FATTN_KQ_STRIDE;

// One block a query. geometry: cells to walk, then parts; *gaps is set where the cells that a query sees are not one
// run from cell 0
static __global__ void exact_geometry(const char * __restrict__ mask, int * __restrict__ geometry, int * gaps,
                                      const int n_kv, const int n_heads, const int tile, const int per_sm,
                                      const int n_sm, const int64_t nb1, const int64_t nb3, const int ne3) {
    const uint16_t * row = (const uint16_t *) (mask + (blockIdx.y % ne3) * nb3 + blockIdx.x * nb1);
    int count = 0;
    int end   = 0;
    for (int i = threadIdx.x; i < n_kv; i += blockDim.x) {
        if (row[i] != 0xfc00) {  // minus infinity
            count++;
            end = i + 1;
        }
    }
    __shared__ int counts[WARP_SIZE];
    __shared__ int ends[WARP_SIZE];
    count = warp_reduce_sum<WARP_SIZE>(count);
    end   = warp_reduce_max<WARP_SIZE>((float) end);  // exact: below 2^24
    if (threadIdx.x % WARP_SIZE == 0) {
        counts[threadIdx.x / WARP_SIZE] = count;
        ends[threadIdx.x / WARP_SIZE]   = end;
    }
    __syncthreads();
    if (threadIdx.x > 0) {
        return;
    }
    for (int i = 1; i < int(blockDim.x) / WARP_SIZE; ++i) {
        count += counts[i];
        end    = max(end, ends[i]);
    }
    const int cells = min((max(count, 1) + KV_PADDING - 1) / KV_PADDING * KV_PADDING, n_kv);
    const int query = blockIdx.y * gridDim.x + blockIdx.x;
    geometry[query] = count == end ? cells : n_kv;
    geometry[gridDim.x * gridDim.y + query] = parts_alone(cells, n_heads, tile, per_sm, n_sm);
    if (count != end) {
        *gaps = 1;
    }
}

// As stock joins parts, with as many as the query has; a query of one part is divided here and not before
template <int D>
__launch_bounds__(D, 1)
static __global__ void exact_join(const float * __restrict__ parts, const float2 * __restrict__ meta,
                                  float * __restrict__ dst, const int * __restrict__ geometry, const int max_parts) {
    const int n_queries = gridDim.x;
    const int n_heads   = gridDim.y;
    const int at        = (blockIdx.z * n_queries + blockIdx.x) * n_heads + blockIdx.y;
    const int n         = geometry[gridDim.x * gridDim.z + blockIdx.z * n_queries + blockIdx.x];

    parts += (int64_t) at * max_parts * D;
    meta  += (int64_t) at * max_parts;

    float maximum = meta[0].x;
    for (int l = 1; l < n; ++l) {
        maximum = max(maximum, meta[l].x);
    }
    float numerator   = 0.0f;
    float denominator = 0.0f;
    for (int l = 0; l < n; ++l) {
        const float scale = expf(meta[l].x - maximum);
        numerator   += scale * parts[l * D + threadIdx.x];
        denominator += scale * meta[l].y;
    }
    dst[(int64_t) at * D + threadIdx.x] = numerator / denominator;
}

// ---- what a mask says, once for all layers of a pass ----

struct geometry_key {
    const ggml_tensor * mask;
    const void *        kernel;
    int64_t             n_kv;
    int64_t             n_queries;
    int64_t             n_heads;  // layers may differ

    bool operator==(const geometry_key & other) const {
        return mask == other.mask && kernel == other.kernel && n_kv == other.n_kv &&
               n_queries == other.n_queries && n_heads == other.n_heads;
    }
};

constexpr int MAX_KEYS    = 8;
constexpr int KEY_INTS    = 2 * EXACT_MAX_TOKENS;

struct mask_state {
    std::vector<geometry_key> keys;  // of the graph that runs now
    int *                     device = nullptr;  // MAX_KEYS geometries
};

std::mutex mask_mutex;

mask_state & state_of(ggml_backend_cuda_context & ctx) {
    static std::map<std::pair<const void *, int>, mask_state> all;
    return all[{ &ctx, ctx.device }];
}

// A number that kernels set and the host reads: gaps were seen. In memory of the host that the devices map
int * gaps_seen() {
    static int * seen = [] {
        int * p = nullptr;
        if (cudaHostAlloc(&p, sizeof(int), cudaHostAllocMapped | cudaHostAllocPortable) != cudaSuccess) {
            (void) cudaGetLastError();
            return (int *) nullptr;
        }
        *p = 0;
        return p;
    }();
    return seen;
}

struct attention_kernel {
    fattn_kernel_t ours  = nullptr;
    fattn_kernel_t stock = nullptr;
};

template <int D, ggml_type type> attention_kernel kernel_for(bool softcap) {
    if constexpr (type == GGML_TYPE_F16 && D >= 128) {
        if (softcap) {
            return { exact_vec::flash_attn_ext_vec<D, 1, type, type, true>, exact_stock::flash_attn_ext_vec<D, 1, type, type, true> };
        }
    }
    if (softcap) {
        return {};
    }
    return { exact_vec::flash_attn_ext_vec<D, 1, type, type, false>, exact_stock::flash_attn_ext_vec<D, 1, type, type, false> };
}

template <ggml_type type> attention_kernel kernel_of(int64_t D, bool softcap) {
    switch (D) {
        case  64: return kernel_for< 64, type>(softcap);
        case 128: return kernel_for<128, type>(softcap);
        case 256: return kernel_for<256, type>(softcap);
        default:  return {};
    }
}

attention_kernel kernel_of(const ggml_tensor * dst) {
    const ggml_tensor * K = dst->src[1];
    float softcap;
    memcpy(&softcap, (const float *) dst->op_params + 2, sizeof(float));
    if (K->type != dst->src[2]->type) {
        return {};
    }
    switch (K->type) {
        case GGML_TYPE_F16:  return kernel_of<GGML_TYPE_F16> (K->ne[0], softcap != 0.0f);
        case GGML_TYPE_BF16: return kernel_of<GGML_TYPE_BF16>(K->ne[0], softcap != 0.0f);
        case GGML_TYPE_Q8_0: return kernel_of<GGML_TYPE_Q8_0>(K->ne[0], softcap != 0.0f);
        case GGML_TYPE_Q4_0: return kernel_of<GGML_TYPE_Q4_0>(K->ne[0], softcap != 0.0f);
        default:             return {};
    }
}

// True if stock's choice for one token alone is the vector kernel, with n_kv cells
bool is_vec_alone(int device, const ggml_tensor * dst, int64_t n_kv) {
    ggml_tensor Q = *dst->src[0];
    ggml_tensor K = *dst->src[1];
    ggml_tensor V = *dst->src[2];
    ggml_tensor mask = *dst->src[3];
    ggml_tensor one  = *dst;
    Q.ne[1] = Q.ne[3] = K.ne[3] = V.ne[3] = mask.ne[1] = mask.ne[3] = one.ne[2] = one.ne[3] = 1;
    K.ne[1] = V.ne[1] = mask.ne[0] = n_kv;
    one.src[0] = &Q;
    one.src[1] = &K;
    one.src[2] = &V;
    one.src[3] = &mask;
    return ggml_cuda_exact_is_vec(device, &one);
}

// Blocks of stock's one-column kernel that a multiprocessor holds at once
int per_sm_of(fattn_kernel_t kernel) {
    static std::map<std::pair<int, const void *>, int> known;
    int & n = known[{ ggml_cuda_get_device(), (const void *) kernel }];
    if (n == 0) {
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, kernel, 128, 0));
    }
    return n;
}

int max_parts_of(int64_t n_kv, int n_heads, int D, int per_sm, int n_sm) {
    static std::map<std::array<int64_t, 5>, int> known;
    int & n = known[{ n_kv, n_heads, D, per_sm, n_sm }];
    if (n == 0) {
        for (int64_t cells = KV_PADDING; cells <= n_kv; cells += KV_PADDING) {
            n = std::max(n, parts_alone(cells, n_heads, D, per_sm, n_sm));
        }
    }
    return n;
}

template <int D> void launch_join(dim3 blocks, const float * parts, const float2 * meta, float * dst,
                                  const int * geometry, int max_parts, cudaStream_t stream) {
    exact_join<D><<<blocks, D, 0, stream>>>(parts, meta, dst, geometry, max_parts);
}

}  // namespace

bool ggml_cuda_exact_flash_attn_vec_serves(int device, const ggml_tensor * dst) {
    const ggml_tensor * Q    = dst->src[0];
    const ggml_tensor * K    = dst->src[1];
    const ggml_tensor * mask = dst->src[3];
    return mask != nullptr && mask->type == GGML_TYPE_F16 && mask->ne[2] == 1 && K->ne[1] % KV_PADDING == 0 &&
           Q->ne[0] == K->ne[0] && Q->ne[1] * Q->ne[3] <= EXACT_MAX_TOKENS && kernel_of(dst).ours != nullptr &&
           gaps_seen() != nullptr && is_vec_alone(device, dst, KV_PADDING) && is_vec_alone(device, dst, K->ne[1]);
}

void ggml_cuda_exact_flash_attn_vec(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * Q     = dst->src[0];
    const ggml_tensor * K     = dst->src[1];
    const ggml_tensor * V     = dst->src[2];
    const ggml_tensor * mask  = dst->src[3];
    const ggml_tensor * sinks = dst->src[4];
    cudaStream_t        stream = ctx.stream();

    std::lock_guard<std::mutex> lock(mask_mutex);
    const attention_kernel both   = kernel_of(dst);
    const fattn_kernel_t   kernel = both.ours;
    const int n_sm      = ggml_cuda_info().devices[ctx.device].nsm;
    const int per_sm    = per_sm_of(both.stock);
    const int D         = Q->ne[0];
    const int n_heads   = Q->ne[2];
    const int n_queries = Q->ne[1];
    const int n_seq     = Q->ne[3];
    const int n_kv      = K->ne[1];
    const int max_parts = max_parts_of(n_kv, n_heads, D, per_sm, n_sm);

    // where the geometry of this mask is, or is to be
    mask_state & state = state_of(ctx);
    cudaStreamCaptureStatus capture;
    CUDA_CHECK(cudaStreamIsCapturing(stream, &capture));
    if (state.device == nullptr && capture == cudaStreamCaptureStatusNone) {
        CUDA_CHECK(cudaMalloc(&state.device, MAX_KEYS * KEY_INTS * sizeof(int)));
    }
    const geometry_key key = { mask, (const void *) kernel, n_kv, n_queries, n_heads };
    const size_t at = std::find(state.keys.begin(), state.keys.end(), key) - state.keys.begin();
    ggml_cuda_pool_alloc<int> spare(ctx.pool());
    const bool keep     = state.device != nullptr && at < MAX_KEYS && ctx.curr_stream_no == 0;
    int *      geometry = keep ? state.device + at * KEY_INTS : spare.alloc(KEY_INTS);
    if (!keep || at == state.keys.size()) {
        if (keep) {
            state.keys.push_back(key);
        }
        int * gaps = nullptr;
        CUDA_CHECK(cudaHostGetDevicePointer(&gaps, gaps_seen(), 0));
        exact_geometry<<<dim3(n_queries, n_seq, 1), 256, 0, stream>>>(
            (const char *) mask->data, geometry, gaps, n_kv, n_heads, D, per_sm, n_sm, mask->nb[1], mask->nb[3], mask->ne[3]);
        CUDA_CHECK(cudaGetLastError());
    }

    float scale, max_bias, softcap;
    memcpy(&scale,    (const float *) dst->op_params + 0, sizeof(float));
    memcpy(&max_bias, (const float *) dst->op_params + 1, sizeof(float));
    memcpy(&softcap,  (const float *) dst->op_params + 2, sizeof(float));
    if (softcap != 0.0f) {
        scale /= softcap;
    }
    // ALiBi's slopes, as stock makes them
    const uint32_t n_head_log2 = 1u << uint32_t(floorf(log2f(float(n_heads))));
    const float    m0 = powf(2.0f, -(max_bias       ) / n_head_log2);
    const float    m1 = powf(2.0f, -(max_bias / 2.0f) / n_head_log2);

    // with one part in all, stock's kernel divides and writes the result itself
    ggml_cuda_pool_alloc<float>  parts(ctx.pool());
    ggml_cuda_pool_alloc<float2> meta(ctx.pool());
    if (max_parts > 1) {
        parts.alloc(max_parts * ggml_nelements(dst));
        meta.alloc(max_parts * ggml_nrows(dst));
    }
    const ggml_cuda_kernel_launch_params launch =
        ggml_cuda_kernel_launch_params(dim3(n_queries, max_parts, n_heads * n_seq), dim3(WARP_SIZE, 4, 1), 0, stream);
    ggml_cuda_kernel_launch(kernel, launch,
        (const char *) Q->data, (const char *) K->data, (const char *) V->data, (const char *) mask->data,
        sinks ? (const char *) sinks->data : nullptr, geometry,
        max_parts > 1 ? parts.ptr : (float *) dst->data, meta.ptr,
        scale, max_bias, m0, m1, n_head_log2, softcap,
        Q->ne[0], init_fastdiv_values(Q->ne[1]), Q->ne[2], Q->ne[3], Q->nb[1], Q->nb[2], Q->nb[3],
        K->ne[0], K->ne[1], K->ne[2], K->ne[3], K->nb[1], K->nb[2], K->nb[3],
        V->nb[1], V->nb[2], V->nb[3],
        mask->ne[1], mask->ne[2], mask->ne[3], mask->nb[1], mask->nb[2], mask->nb[3]);
    CUDA_CHECK(cudaGetLastError());

    if (max_parts > 1) {
        const dim3 blocks(n_queries, n_heads, n_seq);
        switch (D) {
            case  64: launch_join< 64>(blocks, parts.ptr, meta.ptr, (float *) dst->data, geometry, max_parts, stream); break;
            case 128: launch_join<128>(blocks, parts.ptr, meta.ptr, (float *) dst->data, geometry, max_parts, stream); break;
            case 256: launch_join<256>(blocks, parts.ptr, meta.ptr, (float *) dst->data, geometry, max_parts, stream); break;
            default:  GGML_ABORT("exact batches: head size %d", D);
        }
        CUDA_CHECK(cudaGetLastError());
    }
}

void ggml_cuda_exact_forget_geometry(ggml_backend_cuda_context & ctx) {
    std::lock_guard<std::mutex> lock(mask_mutex);
    state_of(ctx).keys.clear();
}

bool ggml_cuda_exact_gaps_seen() {
    const int * seen = gaps_seen();
    return seen != nullptr && *(volatile const int *) seen != 0;
}
