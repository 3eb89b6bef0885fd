// Quantized weights times 2 to 16 columns, each column in the order of stock's one-column kernel (mmvq.cu).
//
// That kernel gives a row to 128 threads. Thread i sums the blocks of the row that are its own, one partial sum at a
// time; then the four warps are added lane by lane, in order, and the 32 lanes by a butterfly of distances 16, 8, 4, 2,
// 1. The order of the float operations of one output is thus a fixed tree over "virtual threads". Nothing else about
// the geometry moves bits: not the rows of a block, not the columns, not which real thread does the work.
//
// Two families of kernels keep that tree:
// - the vector kernels walk as stock does, with more columns and more rows a block;
// - the matrix kernels (Q4_K, Q5_K, Q6_K) give a warp a few virtual threads of 8 or 16 rows and all columns. Between
//   two float operations of the tree lies a dot product of 4 or 8 small integers. Tensor cores make these for all rows
//   and columns at once: integers of up to 11 bits are exact in half precision, and so are their sums in float, in any
//   order. What remains are the float operations of the tree.
//
// No kernel serves on trust: at its first use on a device it is compared with stock's kernel, bit for bit.

#include "exact.cuh"

#include "../mmvq.cuh"
#include "../quantize.cuh"
#include "../vecdotq.cuh"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace {

constexpr int N_WARPS   = 4;  // of stock's one-column kernel, on the devices that this file serves
constexpr int N_VIRTUAL = N_WARPS * WARP_SIZE;

// ---- vector kernels ----

typedef float (*vec_dot_t)(const void * __restrict__ vbq, const block_q8_1 * __restrict__ bq8_1, const int & kbx,
                           const int & iqs);

template <ggml_type type> struct vector_traits;
template <> struct vector_traits<GGML_TYPE_Q4_0> { static constexpr int vdr = VDR_Q4_0_Q8_1_MMVQ; static constexpr vec_dot_t dot = vec_dot_q4_0_q8_1; };
template <> struct vector_traits<GGML_TYPE_Q4_1> { static constexpr int vdr = VDR_Q4_1_Q8_1_MMVQ; static constexpr vec_dot_t dot = vec_dot_q4_1_q8_1; };
template <> struct vector_traits<GGML_TYPE_Q5_0> { static constexpr int vdr = VDR_Q5_0_Q8_1_MMVQ; static constexpr vec_dot_t dot = vec_dot_q5_0_q8_1; };
template <> struct vector_traits<GGML_TYPE_Q5_1> { static constexpr int vdr = VDR_Q5_1_Q8_1_MMVQ; static constexpr vec_dot_t dot = vec_dot_q5_1_q8_1; };
template <> struct vector_traits<GGML_TYPE_Q8_0> { static constexpr int vdr = VDR_Q8_0_Q8_1_MMVQ; static constexpr vec_dot_t dot = vec_dot_q8_0_q8_1; };
template <> struct vector_traits<GGML_TYPE_Q4_K> { static constexpr int vdr = VDR_Q4_K_Q8_1_MMVQ; static constexpr vec_dot_t dot = vec_dot_q4_K_q8_1; };
template <> struct vector_traits<GGML_TYPE_Q5_K> { static constexpr int vdr = VDR_Q5_K_Q8_1_MMVQ; static constexpr vec_dot_t dot = vec_dot_q5_K_q8_1; };
template <> struct vector_traits<GGML_TYPE_Q6_K> { static constexpr int vdr = VDR_Q6_K_Q8_1_MMVQ; static constexpr vec_dot_t dot = vec_dot_q6_K_q8_1; };

constexpr int VECTOR_MAX_COLS = 8;

// x: weights, n_rows of them, stride_row blocks apart; y: n_cols columns of q8_1 blocks, stride_col_y blocks apart;
// dst: columns stride_dst floats apart
template <ggml_type type, int n_cols, int rows_a_block>
__launch_bounds__(N_VIRTUAL, 1)
static __global__ void exact_vector(const void * __restrict__ x, const block_q8_1 * __restrict__ y,
                                    float * __restrict__ dst, const int n_blocks, const int n_rows,
                                    const int stride_row, const int stride_col_y, const int stride_dst) {
    constexpr int qk       = ggml_cuda_type_traits<type>::qk;
    constexpr int qi       = ggml_cuda_type_traits<type>::qi;
    constexpr int vdr      = vector_traits<type>::vdr;
    constexpr int a_block  = qi / vdr;  // virtual threads that share a block of weights
    constexpr vec_dot_t dot = vector_traits<type>::dot;

    const int tid  = WARP_SIZE * threadIdx.y + threadIdx.x;
    const int row0 = rows_a_block * blockIdx.x;
    const int iqs  = vdr * (tid % a_block);

    int first[rows_a_block];  // first block of each row; a row beyond the last is read as the last and not written
#pragma unroll
    for (int i = 0; i < rows_a_block; ++i) {
        first[i] = min(row0 + i, n_rows - 1) * stride_row;
    }

    float sum[n_cols][rows_a_block] = { { 0.0f } };
    for (int kbx = tid / a_block; kbx < n_blocks; kbx += N_VIRTUAL / a_block) {
        const int kby = kbx * (qk / QK8_1);
#pragma unroll
        for (int j = 0; j < n_cols; ++j) {
#pragma unroll
            for (int i = 0; i < rows_a_block; ++i) {
                sum[j][i] += dot(x, &y[j * stride_col_y + kby], first[i] + kbx, iqs);
            }
        }
    }

    __shared__ float shared[N_WARPS - 1][n_cols][rows_a_block][WARP_SIZE];
    if (threadIdx.y > 0) {
#pragma unroll
        for (int j = 0; j < n_cols; ++j) {
#pragma unroll
            for (int i = 0; i < rows_a_block; ++i) {
                shared[threadIdx.y - 1][j][i][threadIdx.x] = sum[j][i];
            }
        }
    }
    __syncthreads();
    if (threadIdx.y > 0) {
        return;
    }
#pragma unroll
    for (int j = 0; j < n_cols; ++j) {
#pragma unroll
        for (int i = 0; i < rows_a_block; ++i) {
#pragma unroll
            for (int l = 0; l < N_WARPS - 1; ++l) {
                sum[j][i] += shared[l][j][i][threadIdx.x];
            }
            sum[j][i] = warp_reduce_sum<WARP_SIZE>(sum[j][i]);
            if (int(threadIdx.x) == i && row0 + i < n_rows) {
                dst[j * stride_dst + row0 + i] = sum[j][i];
            }
        }
    }
}

// ---- matrix kernels: activations ----

// Rows of the tensor core's product are tokens, columns are rows of weights, k are the values of one or two dot
// products. In a fragment, thread 4*g + t holds token g (and g + 8), weight row g, and the values 2t and 2t + 1 of k.

constexpr int MATRIX_THREADS = 256;  // eight warps

// What the matrix kernels read of 256 activations of 16 tokens: quantized as stock does, then laid out so that each
// thread finds its part of a fragment in one load
struct packed_q8 {
    uint4  dot8[4][4][WARP_SIZE];   // [pair of sub-blocks][lane][thread]: fragments of both sub-blocks (Q4_K, Q5_K)
    uint4  dot4[8][2][WARP_SIZE];   // [eighth][pair of lanes][thread]: fragments of both sub-blocks (Q6_K)
    uint2  sums[4][WARP_SIZE];      // [pair of sub-blocks][thread]: sums of 8 values, k = 2*lane + sub-block
    float4 scales[8][8];            // [pair][token g]: scales of sub-blocks (first, second) of g, of g + 8
};

static __device__ __forceinline__ uint32_t half2_of(const int low, const int high) {
    const half2 pair = __halves2half2(__int2half_rn(low), __int2half_rn(high));
    return *(const uint32_t *) &pair;
}

// One block a 256 values: warp w quantizes token w, then all threads lay out. for_q6: which of the two layouts
template <bool for_q6>
__launch_bounds__(16 * WARP_SIZE, 1)
static __global__ void exact_pack(const float * __restrict__ x, packed_q8 * __restrict__ packed, const int n_tokens,
                                  const int64_t stride_x) {
    __shared__ int8_t q[16][QK_K];
    __shared__ float  d[16][QK_K / QK8_1];

    const int token = threadIdx.x / WARP_SIZE;
    const int lane  = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int s = 0; s < QK_K / QK8_1; ++s) {
        const float xi = token < n_tokens ? x[token * stride_x + blockIdx.x * QK_K + s * QK8_1 + lane] : 0.0f;
        // as quantize_q8_1
        float amax = fabsf(xi);
        amax = warp_reduce_max<QK8_1>(amax);
        const float  di = amax / 127.0f;
        const int8_t qi = amax == 0.0f ? 0 : roundf(xi / di);
        q[token][s * QK8_1 + lane] = qi;
        if (lane == 0) {
            d[token][s] = __half2float(__float2half_rn(di));
        }
    }
    __syncthreads();

    packed_q8 & out = packed[blockIdx.x];
    const int g = lane / 4;
    const int t = lane % 4;
    if constexpr (for_q6) {
        const int eighth = token / 2;
        const int pair   = token % 2;
        const int sub    = 4 * (eighth / 4) + (eighth % 4) / 2;
        const int at     = 4 * (4 * (eighth % 2) + 2 * pair + t / 2) + t % 2;
        uint32_t f[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int8_t * values = &q[g + 8 * h][QK8_1 * (sub + 2 * i) + at];
                f[i][h] = half2_of(values[0], values[2]);
            }
        }
        out.dot4[eighth][pair][lane] = make_uint4(f[0][0], f[0][1], f[1][0], f[1][1]);
        if (threadIdx.x < 64) {
            const int e  = threadIdx.x / 8;
            const int tk = threadIdx.x % 8;
            const int sb = 4 * (e / 4) + (e % 4) / 2;
            out.scales[e][tk] = make_float4(d[tk][sb], d[tk][sb + 2], d[tk + 8][sb], d[tk + 8][sb + 2]);
        }
    } else {
        const int p  = token / 4;
        const int at = 4 * (token % 4 + 4 * (t / 2)) + t % 2;
        uint32_t f[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int8_t * values = &q[g + 8 * h][QK8_1 * (2 * p + i) + at];
                f[i][h] = half2_of(values[0], values[2]);
            }
        }
        out.dot8[p][token % 4][lane] = make_uint4(f[0][0], f[0][1], f[1][0], f[1][1]);
        if (token < 4) {
            uint32_t sums[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int sum[2] = { 0, 0 };
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int8_t * values = &q[g + 8 * h][QK8_1 * (2 * token + i) + 4 * t];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        sum[i] += values[j] + values[16 + j];
                    }
                }
                sums[h] = half2_of(sum[0], sum[1]);
            }
            out.sums[token][lane] = make_uint2(sums[0], sums[1]);
        }
        if (threadIdx.x < 32) {
            const int pp = threadIdx.x / 8;
            const int tk = threadIdx.x % 8;
            out.scales[pp][tk] = make_float4(d[tk][2 * pp], d[tk][2 * pp + 1], d[tk + 8][2 * pp], d[tk + 8][2 * pp + 1]);
        }
    }
}

// ---- matrix kernels: products ----

// d = a * b for 16 tokens, 8 values, 8 rows of weights. Exact: see the head of this file
static __device__ __forceinline__ void product(float (&d)[4], const uint32_t a0, const uint32_t a1, const uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(b), "f"(0.0f));
}

static __device__ __forceinline__ uint32_t fma2(const uint32_t a, const half2 b, const half2 c) {
    const half2 r = __hfma2(*(const half2 *) &a, b, c);
    return *(const uint32_t *) &r;
}

static __device__ __forceinline__ uint32_t add2(const uint32_t a, const half2 b) {
    const half2 r = __hadd2(*(const half2 *) &a, b);
    return *(const uint32_t *) &r;
}

static __device__ __forceinline__ uint4 load16(const void * p) {
    return __ldg((const uint4 *) p);
}

// The end of the tree: sums of each virtual thread of a lane are in sh[warp][lane of four][value][thread]. With
// `halves`, warp w and w + 4 hold the two halves of a lane that stock keeps 16 apart; without, warps are lanes / 4
template <int n_tiles, int n_values>
static __device__ __forceinline__ void write_out(const float * sh, float * __restrict__ dst, const int row0,
                                                 const int n_rows, const int n_tokens, const int stride_dst) {
    constexpr int n = n_tiles * n_values;  // values a thread and lane
    for (int at = threadIdx.x; at < n * WARP_SIZE; at += MATRIX_THREADS) {
        const int value  = at / WARP_SIZE;
        const int thread = at % WARP_SIZE;
        float s[8][4];
#pragma unroll
        for (int w = 0; w < 8; ++w) {
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                s[w][l] = sh[((w * 4 + l) * n + value) * WARP_SIZE + thread];
            }
        }
#pragma unroll
        for (int distance = 4; distance > 0; distance /= 2) {  // 16, 8 and 4 lanes apart
#pragma unroll
            for (int w = 0; w < distance; ++w) {
#pragma unroll
                for (int l = 0; l < 4; ++l) {
                    s[w][l] = s[w][l] + s[w + distance][l];
                }
            }
        }
        const float result = (s[0][0] + s[0][2]) + (s[0][1] + s[0][3]);

        const int tile  = value / n_values;
        const int e     = value % n_values;
        const int token = thread / 4 + 8 * (e / 2);
        const int row   = row0 + 8 * tile + 2 * (thread % 4) + e % 2;
        if (token < n_tokens && row < n_rows) {
            dst[token * stride_dst + row] = result;
        }
    }
}

// Q4_K and Q5_K. A block of weights belongs to 16 virtual threads, 16 lanes apart in two halves: a warp takes four
// lanes (one pair of sub-blocks) of one half. n_values: 2 for up to 8 tokens, 4 for up to 16
template <ggml_type type, int n_tiles, int n_values, bool totals_in_registers, int min_blocks>
__launch_bounds__(MATRIX_THREADS, min_blocks)
static __global__ void exact_matrix_q45(const void * __restrict__ x, const packed_q8 * __restrict__ y,
                                        float * __restrict__ dst, const int n_blocks, const int n_rows,
                                        const int n_tokens, const int stride_row, const int stride_dst) {
    constexpr int block_bytes = type == GGML_TYPE_Q4_K ? sizeof(block_q4_K) : sizeof(block_q5_K);
    constexpr int qs_at       = type == GGML_TYPE_Q4_K ? 16 : 48;

    const int lane = threadIdx.x % WARP_SIZE;
    const int warp = threadIdx.x / WARP_SIZE;
    const int p    = warp % 4;
    const int half_of_lanes = warp / 4;
    const int g    = lane / 4;
    const int t    = lane % 4;
    const int row0 = 8 * n_tiles * blockIdx.x;

    const char * rows[n_tiles];
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
        rows[n] = (const char *) x + (int64_t) min(row0 + 8 * n + g, n_rows - 1) * stride_row * block_bytes;
    }

    // sums of this thread's virtual threads: lanes 4 * warp to 4 * warp + 3, so that 16, 8 and 4 lanes apart are warps
    __shared__ float sh[8 * 4 * n_tiles * n_values * WARP_SIZE];
    float * own = sh + warp * 4 * n_tiles * n_values * WARP_SIZE + lane;
    [[maybe_unused]] float in_registers[n_tiles][4][n_values];
    float sum[n_tiles][4][n_values];

#pragma unroll 1
    for (int v = 0; v < N_WARPS; ++v) {
#pragma unroll
        for (int n = 0; n < n_tiles; ++n) {
#pragma unroll
            for (int l = 0; l < 4; ++l) {
#pragma unroll
                for (int e = 0; e < n_values; ++e) {
                    sum[n][l][e] = 0.0f;
                }
            }
        }
#pragma unroll 1
        for (int kbx = 2 * v + half_of_lanes; kbx < n_blocks; kbx += 2 * N_WARPS) {
            const packed_q8 & block = y[kbx];
            uint4 head[n_tiles];
            uint4 qs[n_tiles];
            uint4 qh[n_tiles];
#pragma unroll
            for (int n = 0; n < n_tiles; ++n) {
                const char * at = rows[n] + kbx * block_bytes;
                head[n] = load16(at);
                qs[n]   = load16(at + qs_at + 32 * p + 16 * (t / 2));
                if constexpr (type == GGML_TYPE_Q5_K) {
                    qh[n] = load16(at + 16 + 16 * (t / 2));
                }
            }
            const uint2  sums   = block.sums[p][lane];
            const float4 scales = block.scales[p][g];
            const float  d8[2][2] = { { scales.x, scales.y }, { scales.z, scales.w } };

            half2 scale0[n_tiles], base0[n_tiles], scale1[n_tiles], base1[n_tiles];
            uint32_t min0[n_tiles], min1[n_tiles];
            float dm_d[n_tiles][2], dm_m[n_tiles][2];
#pragma unroll
            for (int n = 0; n < n_tiles; ++n) {
                const int      shift = 16 * (p & 1);
                const uint32_t s0 = (head[n].y >> shift) & 0xffff;
                const uint32_t s2 = (head[n].z >> shift) & 0xffff;
                const uint32_t s4 = (head[n].w >> shift) & 0xffff;
                const uint32_t sc = p < 2 ? s0 & 0x3f3f : (s4 & 0x0f0f) | ((s0 & 0xc0c0) >> 2);
                const uint32_t mi = p < 2 ? s2 & 0x3f3f : ((s4 >> 4) & 0x0f0f) | ((s2 & 0xc0c0) >> 2);
                // bytes 0 and 1 into the mantissas of 1024 + value
                const uint32_t sc2 = add2(__byte_perm(sc, 0x64, 0x4140), __float2half2_rn(-1024.0f));
                const uint32_t mi2 = add2(__byte_perm(mi, 0x64, 0x4140), __float2half2_rn(-1024.0f));
                const half2 sch = *(const half2 *) &sc2;
                scale0[n] = __low2half2(sch);
                base0[n]  = __hmul2(scale0[n], __float2half2_rn(-1024.0f));
                scale1[n] = __hmul2(__high2half2(sch), __float2half2_rn(1.0f / 16.0f));
                base1[n]  = __hmul2(__high2half2(sch), __float2half2_rn(-64.0f));
                min0[n]   = mi2 & 0x0000ffff;
                min1[n]   = mi2 & 0xffff0000;
#pragma unroll
                for (int c = 0; c < 2; ++c) {  // the weight rows of this thread's results
                    const uint32_t dm = __shfl_sync(0xffffffff, head[n].x, 4 * (2 * t + c));
                    dm_d[n][c] = __low2float(*(const half2 *) &dm);
                    dm_m[n][c] = __high2float(*(const half2 *) &dm);
                }
            }
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                const uint4 a = block.dot8[p][l][lane];
#pragma unroll
                for (int n = 0; n < n_tiles; ++n) {
                    const uint32_t word = (l == 0 ? qs[n].x : l == 1 ? qs[n].y : l == 2 ? qs[n].z : qs[n].w) >> (8 * (t & 1));
                    uint32_t w0 = (word & 0x000f000f) | 0x64006400;  // 1024 + value
                    uint32_t w1 = (word & 0x00f000f0) | 0x64006400;  // 1024 + 16 * value
                    if constexpr (type == GGML_TYPE_Q5_K) {
                        const uint32_t high = (l == 0 ? qh[n].x : l == 1 ? qh[n].y : l == 2 ? qh[n].z : qh[n].w) >> (8 * (t & 1) + 2 * p);
                        w0 |= (high << 4) & 0x00100010;
                        w1 |= (high << 7) & 0x01000100;
                    }
                    float dot[2][4];
                    float low[2][4];
                    product(dot[0], a.x, a.y, fma2(w0, scale0[n], base0[n]));
                    product(dot[1], a.z, a.w, fma2(w1, scale1[n], base1[n]));
                    product(low[0], sums.x, sums.y, t == l ? min0[n] : 0);
                    product(low[1], sums.x, sums.y, t == l ? min1[n] : 0);
#pragma unroll
                    for (int e = 0; e < n_values; ++e) {
                        const float sum_d = __fmaf_rn(d8[e / 2][1], dot[1][e], __fmul_rn(d8[e / 2][0], dot[0][e]));
                        const float sum_m = __fmaf_rn(d8[e / 2][1], low[1][e], __fmul_rn(d8[e / 2][0], low[0][e]));
                        const float part  = __fmaf_rn(sum_d, dm_d[n][e % 2], -__fmul_rn(sum_m, dm_m[n][e % 2]));
                        sum[n][l][e] = __fadd_rn(sum[n][l][e], part);
                    }
                }
            }
        }
#pragma unroll
        for (int n = 0; n < n_tiles; ++n) {
#pragma unroll
            for (int l = 0; l < 4; ++l) {
#pragma unroll
                for (int e = 0; e < n_values; ++e) {
                    float & total = totals_in_registers ? in_registers[n][l][e] : own[(l * n_tiles * n_values + n * n_values + e) * WARP_SIZE];
                    total = v == 0 ? sum[n][l][e] : __fadd_rn(total, sum[n][l][e]);
                }
            }
        }
    }

    if constexpr (totals_in_registers) {
#pragma unroll
        for (int n = 0; n < n_tiles; ++n) {
#pragma unroll
            for (int l = 0; l < 4; ++l) {
#pragma unroll
                for (int e = 0; e < n_values; ++e) {
                    own[(l * n_tiles * n_values + n * n_values + e) * WARP_SIZE] = in_registers[n][l][e];
                }
            }
        }
    }
    __syncthreads();
    write_out<n_tiles, n_values>(sh, dst, row0, n_rows, n_tokens, stride_dst);
}

// Q6_K. A block of weights belongs to 32 virtual threads, two dot products of 4 values each: warp w takes lanes 4w to
// 4w + 3. One fragment holds two lanes; the weights of the other one are set to zero
template <int n_tiles, int n_values, bool totals_in_registers, int min_blocks>
__launch_bounds__(MATRIX_THREADS, min_blocks)
static __global__ void exact_matrix_q6(const void * __restrict__ x, const packed_q8 * __restrict__ y,
                                       float * __restrict__ dst, const int n_blocks, const int n_rows,
                                       const int n_tokens, const int stride_row, const int stride_dst) {
    const int lane = threadIdx.x % WARP_SIZE;
    const int warp = threadIdx.x / WARP_SIZE;
    const int g    = lane / 4;
    const int t    = lane % 4;
    const int row0 = 8 * n_tiles * blockIdx.x;

    const block_q6_K * rows[n_tiles];
    const block_q6_K * result_rows[n_tiles][2];
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
        rows[n] = (const block_q6_K *) x + (int64_t) min(row0 + 8 * n + g, n_rows - 1) * stride_row;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            result_rows[n][c] = (const block_q6_K *) x + (int64_t) min(row0 + 8 * n + 2 * t + c, n_rows - 1) * stride_row;
        }
    }
    const int      ql_at    = (16 * warp + 4 * (t / 2)) / 2;  // in 16 bits
    const int      qh_at    = (32 * (warp / 4) + 16 * (warp % 2) + 4 * (t / 2)) / 2;
    const int      qh_shift = 2 * ((warp % 4) / 2);
    const int      scale_at = 8 * (warp / 4) + warp % 4;
    const uint32_t select   = t % 2 == 0 ? 0x2420 : 0x2521;  // byte 0 or 1 of both 16-bit words
    const uint32_t mask_of_lane[2] = { t < 2 ? 0xffffffff : 0, t < 2 ? 0 : 0xffffffff };

    // sums of this thread's virtual threads: lanes 4 * warp to 4 * warp + 3, so that 16, 8 and 4 lanes apart are warps
    __shared__ float sh[8 * 4 * n_tiles * n_values * WARP_SIZE];
    float * own = sh + warp * 4 * n_tiles * n_values * WARP_SIZE + lane;
    [[maybe_unused]] float in_registers[n_tiles][4][n_values];
    float sum[n_tiles][4][n_values];

#pragma unroll 1
    for (int v = 0; v < N_WARPS; ++v) {
#pragma unroll
        for (int n = 0; n < n_tiles; ++n) {
#pragma unroll
            for (int l = 0; l < 4; ++l) {
#pragma unroll
                for (int e = 0; e < n_values; ++e) {
                    sum[n][l][e] = 0.0f;
                }
            }
        }
#pragma unroll 1
        for (int kbx = v; kbx < n_blocks; kbx += N_WARPS) {
            const packed_q8 & block = y[kbx];
            uint32_t ql[n_tiles][2];
            uint32_t qh[n_tiles][2];
            float    sc[n_tiles][2][2];
            float    d[n_tiles][2];
#pragma unroll
            for (int n = 0; n < n_tiles; ++n) {
                const uint16_t * l16 = (const uint16_t *) rows[n][kbx].ql + ql_at;
                const uint16_t * h16 = (const uint16_t *) rows[n][kbx].qh + qh_at;
#pragma unroll
                for (int pair = 0; pair < 2; ++pair) {
                    ql[n][pair] = __byte_perm(__ldg(l16 + 4 * pair), __ldg(l16 + 4 * pair + 1), select);
                    qh[n][pair] = __byte_perm(__ldg(h16 + 4 * pair), __ldg(h16 + 4 * pair + 1), select) >> qh_shift;
                }
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const block_q6_K & b = result_rows[n][c][kbx];
                    sc[n][0][c] = b.scales[scale_at];
                    sc[n][1][c] = b.scales[scale_at + 4];
                    d[n][c]     = __half2float(b.d);
                }
            }
            const float4 scales = block.scales[warp][g];
            const float  d8[2][2] = { { scales.x, scales.y }, { scales.z, scales.w } };
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                const uint4 a = block.dot4[warp][pair][lane];
#pragma unroll
                for (int n = 0; n < n_tiles; ++n) {
                    const uint32_t w0 = add2((ql[n][pair] & 0x000f000f) | ((qh[n][pair] << 4) & 0x00300030) | 0x64006400,
                                             __float2half2_rn(-1056.0f));
                    const uint32_t w1 = add2(((ql[n][pair] >> 4) & 0x000f000f) | (qh[n][pair] & 0x00300030) | 0x64006400,
                                             __float2half2_rn(-1056.0f));
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float dot[2][4];
                        product(dot[0], a.x, a.y, w0 & mask_of_lane[i]);
                        product(dot[1], a.z, a.w, w1 & mask_of_lane[i]);
#pragma unroll
                        for (int e = 0; e < n_values; ++e) {
                            const float part = __fmaf_rn(d8[e / 2][1], __fmul_rn(dot[1][e], sc[n][1][e % 2]),
                                                         __fmul_rn(d8[e / 2][0], __fmul_rn(dot[0][e], sc[n][0][e % 2])));
                            sum[n][2 * pair + i][e] = __fmaf_rn(d[n][e % 2], part, sum[n][2 * pair + i][e]);
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int n = 0; n < n_tiles; ++n) {
#pragma unroll
            for (int l = 0; l < 4; ++l) {
#pragma unroll
                for (int e = 0; e < n_values; ++e) {
                    float & total = totals_in_registers ? in_registers[n][l][e] : own[(l * n_tiles * n_values + n * n_values + e) * WARP_SIZE];
                    total = v == 0 ? sum[n][l][e] : __fadd_rn(total, sum[n][l][e]);
                }
            }
        }
    }

    if constexpr (totals_in_registers) {
#pragma unroll
        for (int n = 0; n < n_tiles; ++n) {
#pragma unroll
            for (int l = 0; l < 4; ++l) {
#pragma unroll
                for (int e = 0; e < n_values; ++e) {
                    own[(l * n_tiles * n_values + n * n_values + e) * WARP_SIZE] = in_registers[n][l][e];
                }
            }
        }
    }
    __syncthreads();
    write_out<n_tiles, n_values>(sh, dst, row0, n_rows, n_tokens, stride_dst);
}

// ---- activations, laid out once for all products that read them ----

enum activation_layout { LAYOUT_Q8_1, LAYOUT_PACKED_Q45, LAYOUT_PACKED_Q6, N_LAYOUTS };

// Laid out activations stay in a buffer of the context until other ones take their place: the products of one tensor
// (query, key and value; gate and up) follow one another
struct kept_activations {
    const ggml_tensor * tensor = nullptr;  // of the graph that runs now
    const void *        data   = nullptr;
    char *              buffer = nullptr;
    size_t              size   = 0;
};

std::array<kept_activations, N_LAYOUTS> & kept_of(ggml_backend_cuda_context & ctx) {
    static std::mutex mutex;
    static std::map<std::pair<const void *, int>, std::array<kept_activations, N_LAYOUTS>> all;
    std::lock_guard<std::mutex> lock(mutex);
    return all[{ &ctx, ctx.device }];
}

bool is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status;
    CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    return status != cudaStreamCaptureStatusNone;
}

// Where `size` bytes of laid out activations of `tensor` are or shall be. Sets `there` if they are there already.
// tensor null, or another stream than the first, or no room while a CUDA graph is captured: `spare` is used
void * place_of(ggml_backend_cuda_context & ctx, activation_layout layout, const ggml_tensor * tensor, size_t size,
                ggml_cuda_pool_alloc<char> & spare, bool & there) {
    there = false;
    if (tensor == nullptr || ctx.curr_stream_no != 0) {
        return spare.alloc(size);
    }
    kept_activations & kept = kept_of(ctx)[layout];
    if (kept.size < size) {
        if (is_capturing(ctx.stream())) {
            return spare.alloc(size);
        }
        // the buffer before is not freed: CUDA graphs that were captured go on using it
        size        = std::max(size, 2 * kept.size);
        CUDA_CHECK(cudaMalloc(&kept.buffer, size));
        kept.size   = size;
        kept.tensor = nullptr;
    }
    there       = kept.tensor == tensor && kept.data == tensor->data;
    kept.tensor = tensor;
    kept.data   = tensor->data;
    return kept.buffer;
}

// ---- which kernel ----

// Weights times columns: x, stride_row in blocks; y: float columns, stride_y floats apart; dst likewise
struct product_args {
    const ggml_tensor * columns;  // the tensor of the graph that y is, or null
    const void *  x;
    const float * y;
    float *       dst;
    int           k;
    int           n_rows;
    int           n_cols;
    int           stride_row;
    int64_t       stride_y;
    int           stride_dst;
};

template <ggml_type type, int n_cols, int rows_a_block>
void launch_vector(const product_args & a, const block_q8_1 * y, int stride_col_y, cudaStream_t stream) {
    const dim3 blocks((a.n_rows + rows_a_block - 1) / rows_a_block, 1, 1);
    const dim3 threads(WARP_SIZE, N_WARPS, 1);
    exact_vector<type, n_cols, rows_a_block><<<blocks, threads, 0, stream>>>(
        a.x, y, a.dst, a.k / ggml_cuda_type_traits<type>::qk, a.n_rows, a.stride_row, stride_col_y, a.stride_dst);
    CUDA_CHECK(cudaGetLastError());
}

template <ggml_type type> void run_vector(ggml_backend_cuda_context & ctx, const product_args & args) {
    cudaStream_t  stream   = ctx.stream();
    const int64_t k_padded = GGML_PAD(args.k, MATRIX_ROW_PADDING);
    const int     stride   = k_padded / QK8_1;
    bool                       there;
    ggml_cuda_pool_alloc<char> spare(ctx.pool());
    block_q8_1 * y = (block_q8_1 *) place_of(ctx, LAYOUT_Q8_1, args.columns,
                                             args.n_cols * k_padded * sizeof(block_q8_1) / QK8_1, spare, there);
    if (!there) {
        quantize_row_q8_1_cuda(args.y, nullptr, y, type, args.k, args.stride_y, args.stride_y * args.n_cols,
                               args.stride_y * args.n_cols, k_padded, args.n_cols, 1, 1, stream);
    }

    const int n_parts = (args.n_cols + VECTOR_MAX_COLS - 1) / VECTOR_MAX_COLS;
    for (int part = 0, first = 0; part < n_parts; part++) {
        const int n = (args.n_cols - first) / (n_parts - part);  // parts of about equal width
        const block_q8_1 * y_n = y + (int64_t) first * stride;
        product_args a = args;
        a.dst += (int64_t) first * args.stride_dst;
        switch (n) {
            case 1: launch_vector<type, 1, 2>(a, y_n, stride, stream); break;
            case 2: launch_vector<type, 2, 4>(a, y_n, stride, stream); break;
            case 3: launch_vector<type, 3, 4>(a, y_n, stride, stream); break;
            case 4: launch_vector<type, 4, 4>(a, y_n, stride, stream); break;
            case 5: launch_vector<type, 5, 4>(a, y_n, stride, stream); break;
            case 6: launch_vector<type, 6, 4>(a, y_n, stride, stream); break;
            case 7: launch_vector<type, 7, 4>(a, y_n, stride, stream); break;
            case 8: launch_vector<type, 8, 4>(a, y_n, stride, stream); break;
            default: GGML_ABORT("exact batches: %d columns at once", n);
        }
        first += n;
    }
}

template <ggml_type type, int n_tiles, int n_values, bool totals_in_registers, int min_blocks>
void launch_matrix(const product_args & a, const packed_q8 * y, cudaStream_t stream) {
    const int n_blocks = a.k / QK_K;
    const int blocks   = (a.n_rows + 8 * n_tiles - 1) / (8 * n_tiles);
    if constexpr (type == GGML_TYPE_Q6_K) {
        exact_matrix_q6<n_tiles, n_values, totals_in_registers, min_blocks><<<blocks, MATRIX_THREADS, 0, stream>>>(
            a.x, y, a.dst, n_blocks, a.n_rows, a.n_cols, a.stride_row, a.stride_dst);
    } else {
        exact_matrix_q45<type, n_tiles, n_values, totals_in_registers, min_blocks><<<blocks, MATRIX_THREADS, 0, stream>>>(
            a.x, y, a.dst, n_blocks, a.n_rows, a.n_cols, a.stride_row, a.stride_dst);
    }
    CUDA_CHECK(cudaGetLastError());
}

int variant() {
    const char * value = getenv("GGML_CUDA_EXACT_VARIANT");
    return value ? atoi(value) : 0;
}

template <ggml_type type> void run_matrix(ggml_backend_cuda_context & ctx, const product_args & a) {
    cudaStream_t  stream   = ctx.stream();
    const int     n_blocks = a.k / QK_K;
    constexpr bool is_q6   = type == GGML_TYPE_Q6_K;
    bool                       there;
    ggml_cuda_pool_alloc<char> spare(ctx.pool());
    packed_q8 * y = (packed_q8 *) place_of(ctx, is_q6 ? LAYOUT_PACKED_Q6 : LAYOUT_PACKED_Q45, a.columns,
                                           n_blocks * sizeof(packed_q8), spare, there);
    if (!there) {
        exact_pack<is_q6><<<n_blocks, 16 * WARP_SIZE, 0, stream>>>(a.y, y, a.n_cols, a.stride_y);
        CUDA_CHECK(cudaGetLastError());
    }

    if (a.n_cols <= 8) {
        switch (variant()) {
            case 1:  launch_matrix<type, 2, 2, false, 2>(a, y, stream); break;
            case 2:  launch_matrix<type, 1, 2, true, 4>(a, y, stream); break;
            case 3:  launch_matrix<type, 1, 2, true, 3>(a, y, stream); break;
            case 4:  launch_matrix<type, 2, 2, false, 3>(a, y, stream); break;
            default: launch_matrix<type, 2, 2, true, 2>(a, y, stream); break;
        }
    } else {
        switch (variant()) {
            case 1:  launch_matrix<type, 2, 4, false, 2>(a, y, stream); break;
            case 2:  launch_matrix<type, 1, 4, true, 3>(a, y, stream); break;
            case 3:  launch_matrix<type, 1, 4, false, 4>(a, y, stream); break;
            case 4:  launch_matrix<type, 2, 4, false, 3>(a, y, stream); break;
            default: launch_matrix<type, 2, 4, true, 2>(a, y, stream); break;
        }
    }
}

typedef void (*run_t)(ggml_backend_cuda_context & ctx, const product_args & args);

run_t vector_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0: return run_vector<GGML_TYPE_Q4_0>;
        case GGML_TYPE_Q4_1: return run_vector<GGML_TYPE_Q4_1>;
        case GGML_TYPE_Q5_0: return run_vector<GGML_TYPE_Q5_0>;
        case GGML_TYPE_Q5_1: return run_vector<GGML_TYPE_Q5_1>;
        case GGML_TYPE_Q8_0: return run_vector<GGML_TYPE_Q8_0>;
        case GGML_TYPE_Q4_K: return run_vector<GGML_TYPE_Q4_K>;
        case GGML_TYPE_Q5_K: return run_vector<GGML_TYPE_Q5_K>;
        case GGML_TYPE_Q6_K: return run_vector<GGML_TYPE_Q6_K>;
        default:             return nullptr;
    }
}

run_t matrix_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_K: return run_matrix<GGML_TYPE_Q4_K>;
        case GGML_TYPE_Q5_K: return run_matrix<GGML_TYPE_Q5_K>;
        case GGML_TYPE_Q6_K: return run_matrix<GGML_TYPE_Q6_K>;
        default:             return nullptr;
    }
}

// Columns from which the matrix kernel serves
int matrix_from() {
    static const int from = [] {
        const char * value = getenv("GGML_CUDA_EXACT_MATRIX_FROM");
        return value ? atoi(value) : 3;
    }();
    return from;
}

// The one-column kernel of devices that this file does not serve has other warps, or fewer threads a warp
bool is_served(int cc) {
    return GGML_CUDA_CC_IS_NVIDIA(cc) && cc >= GGML_CUDA_CC_AMPERE && cc != GGML_CUDA_CC_DGX_SPARK &&
           ggml_cuda_highest_compiled_arch(cc) >= GGML_CUDA_CC_AMPERE;
}

// Compares a kernel with stock's, over blocks of noise, a remainder of rows and every number of columns
bool gives_stock_bits(ggml_backend_cuda_context & ctx, const ggml_tensor * weights, run_t run) {
    constexpr int n_rows = 45;
    constexpr int n_cols = EXACT_MAX_TOKENS;
    const ggml_type type = weights->type;
    cudaStream_t stream  = ctx.stream();
    const int64_t block  = ggml_blck_size(type);
    const int64_t k      = block == QK_K ? 11 * QK_K : 75 * block;  // no multiple of what 128 threads walk at once

    uint32_t state = 12345;
    auto noise = [&state] {
        state = state * 1664525 + 1013904223;
        return (int) (state >> 16) / 32768.0f - 1.0f;
    };
    std::vector<float> values(k * n_rows);
    std::vector<float> columns(k * n_cols);
    for (std::vector<float> * v : { &values, &columns }) {
        for (float & f : *v) {
            f = noise();
        }
    }
    std::vector<char> quantized(ggml_row_size(type, k) * n_rows);
    ggml_quantize_chunk(type, values.data(), quantized.data(), 0, n_rows, k, nullptr);

    ggml_cuda_pool_alloc<char>  x(ctx.pool(), quantized.size() + 512);  // stock may read into the padding
    ggml_cuda_pool_alloc<float> y(ctx.pool(), columns.size());
    ggml_cuda_pool_alloc<float> out(ctx.pool(), n_rows * n_cols);
    CUDA_CHECK(cudaMemsetAsync(x.get(), 0, quantized.size() + 512, stream));
    CUDA_CHECK(cudaMemcpyAsync(x.get(), quantized.data(), quantized.size(), cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaMemcpyAsync(y.get(), columns.data(), columns.size() * sizeof(float), cudaMemcpyHostToDevice, stream));

    ggml_tensor src0 = *weights;
    src0.view_src = nullptr;
    src0.data  = x.get();
    src0.ne[0] = k;
    src0.ne[1] = n_rows;
    src0.nb[1] = ggml_row_size(type, k);
    src0.nb[2] = src0.nb[3] = src0.nb[1] * n_rows;
    std::vector<float> alone(n_rows * n_cols);
    for (int j = 0; j < n_cols; j++) {
        ggml_tensor src1 = *weights;
        src1.type  = GGML_TYPE_F32;
        src1.data  = y.get() + j * k;
        src1.ne[0] = k;
        src1.ne[1] = src1.ne[2] = src1.ne[3] = 1;
        src1.nb[0] = sizeof(float);
        src1.nb[1] = src1.nb[2] = src1.nb[3] = k * sizeof(float);
        ggml_tensor dst = src1;
        dst.data  = out.get() + j * n_rows;
        dst.ne[0] = n_rows;
        dst.nb[1] = dst.nb[2] = dst.nb[3] = n_rows * sizeof(float);
        dst.src[0] = &src0;
        dst.src[1] = &src1;
        ggml_cuda_mul_mat_vec_q(ctx, &src0, &src1, nullptr, &dst);
    }
    CUDA_CHECK(cudaMemcpyAsync(alone.data(), out.get(), alone.size() * sizeof(float), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));

    std::vector<float> together(n_rows * n_cols);
    for (int n = 2; n <= n_cols; n++) {
        CUDA_CHECK(cudaMemsetAsync(out.get(), 0xff, n_rows * n_cols * sizeof(float), stream));
        product_args args;
        args.columns    = nullptr;
        args.x          = x.get();
        args.y          = y.get();
        args.dst        = out.get();
        args.k          = k;
        args.n_rows     = n_rows;
        args.n_cols     = n;
        args.stride_row = k / block;
        args.stride_y   = k;
        args.stride_dst = n_rows;
        run(ctx, args);
        CUDA_CHECK(cudaMemcpyAsync(together.data(), out.get(), n * n_rows * sizeof(float), cudaMemcpyDeviceToHost, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        if (memcmp(together.data(), alone.data(), n * n_rows * sizeof(float)) != 0) {
            GGML_LOG_WARN("exact batches: a kernel for %s does not give stock's bits with %d columns in this build; "
                          "stock's one-column kernel serves instead, column by column\n", ggml_type_name(type), n);
            return false;
        }
    }
    return true;
}

// True if the kernel gave stock's bits on this device. The first question answers itself by a comparison, but not while
// a CUDA graph is captured
bool is_trusted(ggml_backend_cuda_context & ctx, const ggml_tensor * weights, run_t run) {
    static std::mutex mutex;
    static std::map<std::pair<int, run_t>, bool> known;
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = known.find({ ctx.device, run });
    if (found != known.end()) {
        return found->second;
    }
    if (is_capturing(ctx.stream())) {
        return false;
    }
    const bool trusted = gives_stock_bits(ctx, weights, run);
    known[{ ctx.device, run }] = trusted;
    return trusted;
}

}  // namespace

void ggml_cuda_exact_forget_activations(ggml_backend_cuda_context & ctx) {
    for (kept_activations & kept : kept_of(ctx)) {
        kept.tensor = nullptr;
    }
}

bool ggml_cuda_exact_mul_mat_vec_q(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1,
                                   ggml_tensor * dst) {
    if (!ggml_is_quantized(src0->type) || src1->type != GGML_TYPE_F32 || dst->type != GGML_TYPE_F32 ||
        !is_served(ggml_cuda_info().devices[ctx.device].cc) || src1->nb[0] != sizeof(float) ||
        dst->nb[0] != sizeof(float) || src0->nb[0] != ggml_type_size(src0->type)) {
        return false;
    }
    product_args args;
    args.columns    = src1;
    args.x          = src0->data;
    args.y          = (const float *) src1->data;
    args.dst        = (float *) dst->data;
    args.k          = src0->ne[0];
    args.n_rows     = src0->ne[1];
    args.n_cols     = src1->ne[1];
    args.stride_row = src0->nb[1] / ggml_type_size(src0->type);
    args.stride_y   = src1->nb[1] / sizeof(float);
    args.stride_dst = dst->nb[1] / sizeof(float);

    const run_t matrix = args.n_cols >= matrix_from() ? matrix_of(src0->type) : nullptr;
    for (run_t run : { matrix, vector_of(src0->type) }) {
        if (run != nullptr && is_trusted(ctx, src0, run)) {
            run(ctx, args);
            return true;
        }
    }
    return false;
}
