// Which buckets an autograd function in Python read in forward: its backward may read them again without an operator.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "torch_names.h"

namespace zx {

// Note [What a function in Python reads]
// torch.autograd.Function, and what torch.compile makes of a model, read saved parameters in backward with kernels of
// their own. Autograd announces such a backward with the thread and the number of the forward, of which the inputs were
// announced. Calls are remembered until the next step(), the last ones if there are many. For a call that is not
// remembered any more, everything is fetched that a function of this name ever read.

// Not thread-safe.
class PythonFunctions {
 public:
  static constexpr size_t kMostCalls = 1 << 14;
  using Call = std::pair<uint64_t, int64_t>;  // thread and number

  void note(const std::string& name, Call call, std::vector<int64_t> buckets) {
    by_name_[name].insert(buckets.begin(), buckets.end());
    const auto [place, is_new] = by_call_.insert_or_assign(call, std::move(buckets));
    if (is_new) order_.push_back(place->first);
    if (order_.size() <= kMostCalls) return;
    by_call_.erase(order_.front());
    order_.pop_front();
    is_complete_ = false;
  }

  // `name`: the backward's.
  std::vector<int64_t> read_by(const std::string& name, Call call) const {
    const auto found = by_call_.find(call);
    if (found != by_call_.end()) return found->second;
    if (is_complete_ && !is_old_) return {};
    const auto known = by_name_.find(internals::function_of(name));
    if (known == by_name_.end()) return {};
    return {known->second.begin(), known->second.end()};
  }

  // Calls from before a step are forgotten. Few graphs live on until then.
  void forget_calls() {
    is_old_ = is_old_ || !by_call_.empty();
    by_call_.clear();
    order_.clear();
    is_complete_ = true;
  }

  size_t num_calls() const { return by_call_.size(); }

 private:
  std::map<Call, std::vector<int64_t>> by_call_;
  std::deque<Call> order_;  // of their forwards
  std::map<std::string, std::set<int64_t>> by_name_;
  bool is_complete_ = true;  // no call since the last step was forgotten
  bool is_old_ = false;      // calls from before a step may still be in some graph
};

}  // namespace zx
