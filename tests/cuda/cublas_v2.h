// What llama.cpp's CUDA backend names of cuBLAS, for compiling it where the toolkit has no cuBLAS. Nothing links with it.
#pragma once

#include <cuda_runtime_api.h>

#define CUBLAS_VER_MAJOR 13

typedef struct cublasContext * cublasHandle_t;
typedef enum { CUBLAS_STATUS_SUCCESS = 0 } cublasStatus_t;
typedef enum { CUBLAS_OP_N, CUBLAS_OP_T } cublasOperation_t;
typedef enum { CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 } cublasGemmAlgo_t;
typedef enum { CUBLAS_TF32_TENSOR_OP_MATH = 3 } cublasMath_t;
typedef enum { CUBLAS_COMPUTE_16F = 64, CUBLAS_COMPUTE_32F = 68 } cublasComputeType_t;

const char * cublasGetStatusString(cublasStatus_t status);
template <typename... A> cublasStatus_t cublasCreate(A &&... arguments);
template <typename... A> cublasStatus_t cublasDestroy(A &&... arguments);
template <typename... A> cublasStatus_t cublasSetMathMode(A &&... arguments);
template <typename... A> cublasStatus_t cublasSetStream(A &&... arguments);
template <typename... A> cublasStatus_t cublasSetWorkspace(A &&... arguments);
template <typename... A> cublasStatus_t cublasSgemm(A &&... arguments);
template <typename... A> cublasStatus_t cublasGemmEx(A &&... arguments);
template <typename... A> cublasStatus_t cublasGemmStridedBatchedEx(A &&... arguments);
template <typename... A> cublasStatus_t cublasGemmBatchedEx(A &&... arguments);
