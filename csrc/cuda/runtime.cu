// Questions to the CUDA runtime.
#include "cuda/device.cuh"
#include "cuda/kernels.h"

namespace zx::cuda {

const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

int is_capturing(Stream stream, bool* capturing) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  *capturing = status != cudaStreamCaptureStatusNone;
  return error;
}

}  // namespace zx::cuda
