// cuDNN's older interface (library.py turns the newer one off): the calls with results.
#include <cudnn.h>

#include <cstring>

#include "shared.h"

#define MAKES(name, Type)                   \
  API cudnnStatus_t name(Type* made) {      \
    *made = (Type)0x300;                    \
    return CUDNN_STATUS_SUCCESS;            \
  }
MAKES(cudnnCreate, cudnnHandle_t)
MAKES(cudnnCreateTensorDescriptor, cudnnTensorDescriptor_t)
MAKES(cudnnCreateFilterDescriptor, cudnnFilterDescriptor_t)
MAKES(cudnnCreateConvolutionDescriptor, cudnnConvolutionDescriptor_t)
MAKES(cudnnCreateActivationDescriptor, cudnnActivationDescriptor_t)

using Handle = cudnnHandle_t;
using Tensor = cudnnTensorDescriptor_t;
using Filter = cudnnFilterDescriptor_t;
using Convolution = cudnnConvolutionDescriptor_t;
using Activation = cudnnActivationDescriptor_t;

// Each search finds one algorithm, which needs no workspace.
template <class Result>
static cudnnStatus_t found(int* count, Result* results) {
  memset(results, 0, sizeof *results);
  results->algo = (decltype(results->algo))1;
  results->status = CUDNN_STATUS_SUCCESS;
  results->time = 0.1f;
  *count = 1;
  return CUDNN_STATUS_SUCCESS;
}
static cudnnStatus_t no_bytes(size_t* bytes) {
  *bytes = 0;
  return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnFindConvolutionForwardAlgorithmEx(Handle, Tensor, const void*, Filter, const void*, Convolution,
                                                         Tensor, void*, int, int* count,
                                                         cudnnConvolutionFwdAlgoPerf_t* results, void*, size_t) {
  return found(count, results);
}
API cudnnStatus_t cudnnFindConvolutionBackwardDataAlgorithmEx(Handle, Filter, const void*, Tensor, const void*,
                                                              Convolution, Tensor, void*, int, int* count,
                                                              cudnnConvolutionBwdDataAlgoPerf_t* results, void*,
                                                              size_t) {
  return found(count, results);
}
API cudnnStatus_t cudnnFindConvolutionBackwardFilterAlgorithmEx(Handle, Tensor, const void*, Tensor, const void*,
                                                                Convolution, Filter, void*, int, int* count,
                                                                cudnnConvolutionBwdFilterAlgoPerf_t* results, void*,
                                                                size_t) {
  return found(count, results);
}
API cudnnStatus_t cudnnGetConvolutionForwardAlgorithm_v7(Handle, Tensor, Filter, Convolution, Tensor, int, int* count,
                                                         cudnnConvolutionFwdAlgoPerf_t* results) {
  return found(count, results);
}
API cudnnStatus_t cudnnGetConvolutionBackwardDataAlgorithm_v7(Handle, Filter, Tensor, Convolution, Tensor, int,
                                                              int* count, cudnnConvolutionBwdDataAlgoPerf_t* results) {
  return found(count, results);
}
API cudnnStatus_t cudnnGetConvolutionBackwardFilterAlgorithm_v7(Handle, Tensor, Tensor, Convolution, Filter, int,
                                                                int* count,
                                                                cudnnConvolutionBwdFilterAlgoPerf_t* results) {
  return found(count, results);
}
API cudnnStatus_t cudnnGetConvolutionForwardWorkspaceSize(Handle, Tensor, Filter, Convolution, Tensor,
                                                          cudnnConvolutionFwdAlgo_t, size_t* bytes) {
  return no_bytes(bytes);
}
API cudnnStatus_t cudnnGetConvolutionBackwardDataWorkspaceSize(Handle, Filter, Tensor, Convolution, Tensor,
                                                               cudnnConvolutionBwdDataAlgo_t, size_t* bytes) {
  return no_bytes(bytes);
}
API cudnnStatus_t cudnnGetConvolutionBackwardFilterWorkspaceSize(Handle, Tensor, Tensor, Convolution, Filter,
                                                                 cudnnConvolutionBwdFilterAlgo_t, size_t* bytes) {
  return no_bytes(bytes);
}
API cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(Handle, cudnnBatchNormMode_t,
                                                                           cudnnBatchNormOps_t, Tensor, Tensor, Tensor,
                                                                           Tensor, Activation, size_t* bytes) {
  return no_bytes(bytes);
}
API cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(Handle, cudnnBatchNormMode_t, cudnnBatchNormOps_t,
                                                                    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                                                                    Activation, size_t* bytes) {
  return no_bytes(bytes);
}
API cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(Handle, cudnnBatchNormMode_t,
                                                                       cudnnBatchNormOps_t, Activation, Tensor,
                                                                       size_t* bytes) {
  return no_bytes(bytes);
}
