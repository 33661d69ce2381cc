#include "exchange/collectives.h"

#include <utility>

#include "torch_internals.h"

namespace zx {
namespace {

std::vector<at::Tensor> all_unknown(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> unknown;
  for (const at::Tensor& tensor : tensors) unknown.push_back(unknown_to_python(tensor));
  return unknown;
}

}  // namespace

at::Tensor unknown_to_python(const at::Tensor& tensor) { return tensor.tensor_data(); }

Work start_all_reduce(const Group& group, const at::Tensor& values, c10d::ReduceOp::RedOpType op) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  std::vector<at::Tensor> tensors{unknown_to_python(values)};
  return group->allreduce(tensors, options);
}

Work start_broadcast(const Group& group, const at::Tensor& values, int root) {
  c10d::BroadcastOptions options;
  options.rootRank = root;
  std::vector<at::Tensor> tensors{unknown_to_python(values)};
  return group->broadcast(tensors, options);
}

Work start_gather(const Group& group, const std::vector<at::Tensor>& received, const at::Tensor& sent, int root) {
  c10d::GatherOptions options;
  options.rootRank = root;
  std::vector<std::vector<at::Tensor>> outputs;
  if (!received.empty()) outputs.push_back(all_unknown(received));
  std::vector<at::Tensor> inputs{unknown_to_python(sent)};
  return group->gather(outputs, inputs, options);
}

Work start_all_gather(const Group& group, const std::vector<at::Tensor>& received, const at::Tensor& sent) {
  std::vector<std::vector<at::Tensor>> outputs{all_unknown(received)};
  std::vector<at::Tensor> inputs{unknown_to_python(sent)};
  return group->allgather(outputs, inputs);
}

Work start_all_to_all(const Group& group, const at::Tensor& received, const at::Tensor& sent,
                      std::vector<int64_t> from_each, std::vector<int64_t> to_each) {
  using Op = Work(at::Tensor&, at::Tensor&, const Group&, std::vector<int64_t>, std::vector<int64_t>, bool, int64_t);
  static const auto op = internals::find_operator<Op>(internals::kAllToAll);
  at::Tensor output = unknown_to_python(received);
  at::Tensor input = unknown_to_python(sent);
  return op.call(output, input, group, std::move(from_each), std::move(to_each), true, -1);
}

}  // namespace zx
