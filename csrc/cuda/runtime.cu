// Questions to the CUDA runtime.
#include "cuda/device.cuh"
#include "cuda/kernels.h"

namespace zx::cuda {

const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream.handle, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

}  // namespace zx::cuda
