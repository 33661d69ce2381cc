#include "grads/agreement.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "check.h"
#include "locks.h"

namespace zx {
namespace {

// Runs `collective` on a tensor of the numbers, and copies the result back. The tensor owns its memory: after an error
// the backend may still hold it.
template <class Numbers, class Collective>
void with_tensor(Numbers& numbers, at::ScalarType type, const Collective& collective) {
  std::vector<at::Tensor> tensors{at::empty({static_cast<int64_t>(numbers.size())}, type)};
  auto* data = static_cast<typename Numbers::value_type*>(tensors[0].data_ptr());
  std::copy(numbers.begin(), numbers.end(), data);
  collective(tensors);
  std::copy_n(data, numbers.size(), numbers.begin());
}

// Ranks without a backward of their own don't limit the others: they join whatever the others launched.
bool has_own_rounds(const LocalStatus& s) { return s.rounds.own > 0 && s.call.sync_point != SyncPoint::follow; }

// A rank whose forward decided that its backward stays limits them too: theirs should have stayed.
bool has_kept(const LocalStatus& s) { return s.rounds.has_kept && s.call.sync_point != SyncPoint::follow; }

using Number = int64_t (*)(const LocalStatus&);
constexpr std::array<Number, static_cast<size_t>(Said::kCount)> kFields = {
    [](const LocalStatus& s) { return static_cast<int64_t>(s.call.sync_point); },
    [](const LocalStatus& s) {
      return s.call.sync_point == SyncPoint::follow ? kNowhere : static_cast<int64_t>(s.call.sync_point);
    },
    [](const LocalStatus& s) { return s.rounds.all; },
    [](const LocalStatus& s) { return has_own_rounds(s) || has_kept(s) ? s.rounds.all : kNoBackward; },
    [](const LocalStatus& s) { return has_own_rounds(s) ? s.rounds.inner.count : kNoBackward; },
    [](const LocalStatus& s) { return has_own_rounds(s) ? s.rounds.all - s.rounds.inner.count : kNoBackward; },
    [](const LocalStatus& s) { return has_own_rounds(s) ? s.rounds.inner.dropped : kNoBackward; },
    [](const LocalStatus& s) { return has_own_rounds(s) ? -s.rounds.inner.dropped : kNoBackward; },
    [](const LocalStatus& s) { return has_own_rounds(s) ? s.rounds.order : kNoBackward; },
    [](const LocalStatus& s) { return has_own_rounds(s) ? -s.rounds.order : kNoBackward; },
    [](const LocalStatus& s) { return static_cast<int64_t>(s.failed); },
    [](const LocalStatus& s) { return static_cast<int64_t>(s.unsent); },
    [](const LocalStatus& s) { return static_cast<int64_t>(s.changed); },
    [](const LocalStatus& s) { return s.call.adoptions; },
    [](const LocalStatus& s) { return static_cast<int64_t>(s.scaled); },
    [](const LocalStatus& s) { return static_cast<int64_t>(s.zeroed); },
    [](const LocalStatus& s) { return static_cast<int64_t>(s.proposes); },
};
constexpr size_t kNumFields = kFields.size();
constexpr size_t kNumArguments = std::tuple_size_v<Arguments>;

// A message: two maxima of each field, of each argument, of the operators, the parameters and the options, a sum, and
// the sets.
constexpr size_t kArgumentsStart = 2 * kNumFields;
constexpr size_t kOperatorsStart = kArgumentsStart + 2 * kNumArguments;
constexpr size_t kParamsStart = kOperatorsStart + 2;
constexpr size_t kOptionsStart = kParamsStart + 2;
constexpr size_t kSum = kOptionsStart + 2;
constexpr size_t kSetStart = kSum + 1;

void combine_statuses(at::Tensor& values, const at::Tensor& theirs) {
  auto* mine = values.mutable_data_ptr<int64_t>();
  const auto* other = theirs.const_data_ptr<int64_t>();
  for (size_t i = 0; i < kSum; ++i) mine[i] = std::max(mine[i], other[i]);
  mine[kSum] += other[kSum];
  for (auto i = static_cast<int64_t>(kSetStart); i < values.numel(); ++i) mine[i] |= other[i];
}

// Doubles are compared by their bits, whatever order that is. The least is the complement of the largest complement.
void pack_arguments(const LocalStatus& s, std::vector<int64_t>& packed) {
  const auto pack = [&](double number, bool is_said) {
    const auto bits = std::bit_cast<int64_t>(number + 0.0);  // -0 is 0
    packed.push_back(is_said ? bits : std::numeric_limits<int64_t>::min());
    packed.push_back(is_said ? ~bits : std::numeric_limits<int64_t>::min());
  };
  const bool is_in_call = s.call.sync_point != SyncPoint::backward_end;
  const bool leads = is_in_call && s.call.sync_point != SyncPoint::follow;
  for (const double argument : s.call.arguments) pack(argument, leads);
  pack(s.call.operators, leads);
  pack(s.call.params, leads);
  pack(s.call.options, is_in_call);
}

void unpack_arguments(const std::vector<int64_t>& packed, ReducedStatus& reduced) {
  for (size_t i = 0; i < kNumArguments; ++i) {
    reduced.most_arguments[i] = std::bit_cast<double>(packed[kArgumentsStart + 2 * i]);
    reduced.least_arguments[i] = std::bit_cast<double>(~packed[kArgumentsStart + 2 * i + 1]);
  }
  const int64_t operators = packed[kOperatorsStart];
  const bool are_said = operators != std::numeric_limits<int64_t>::min();  // else all follow, or are in a backward
  reduced.has_same_operators = !are_said || operators == ~packed[kOperatorsStart + 1];
  reduced.has_same_params = !are_said || packed[kParamsStart] == ~packed[kParamsStart + 1];
  reduced.operators = are_said ? std::bit_cast<double>(operators) : 0.0;
  reduced.has_same_options = packed[kOptionsStart] == ~packed[kOptionsStart + 1];
}

}  // namespace

template <class Question>
void Agreement::ask(const Question& question) {
  check_may_wait("the other ranks");
  try {
    question();
  } catch (const std::exception& error) {
    const std::string awaited = trouble_();
    TORCH_CHECK(false, "zerox: in ", where_, " a rank did not answer: ", reason_of(error), "\n",
                awaited.empty() ? "no bucket is awaited: all gradients that were sent have arrived" : awaited);
  }
}

ReducedStatus Agreement::agree(const LocalStatus& s) {
  where_ = Doing::current_text();
  const int64_t world = control_.group ? control_.group->getSize() : 1;
  const int64_t rank = control_.group ? control_.group->getRank() : 0;
  // A maximum also carries the rank that it came from, and a minimum is the maximum of the negatives.
  std::vector<int64_t> packed;
  for (const Number said : kFields) {
    packed.push_back(said(s) * world + rank);
    packed.push_back(-said(s) * world + rank);
  }
  pack_arguments(s, packed);
  packed.push_back(s.active ? 1 : 0);
  const std::vector<int64_t>& with_grad = s.with_grad.words();
  packed.insert(packed.end(), with_grad.begin(), with_grad.end());
  const size_t placements_start = packed.size();
  packed.insert(packed.end(), s.placements.words().begin(), s.placements.words().end());
  const auto piggybacks_start = static_cast<int64_t>(packed.size());
  const auto piggyback_size = static_cast<int64_t>(s.piggyback.size());
  packed.resize(packed.size() + world * piggyback_size);  // each rank's in its place, 0 in all others
  std::copy(s.piggyback.begin(), s.piggyback.end(), packed.begin() + piggybacks_start + rank * piggyback_size);
  if (control_.group) {
    ask([&] {
      with_tensor(packed, at::kLong,
                  [this](std::vector<at::Tensor>& tensors) { small_.run(tensors[0], combine_statuses); });
    });
    control_.failure_detector->passed(where_);
  }
  ReducedStatus reduced{};
  for (size_t i = 0; i < kNumFields; ++i) {
    const auto rank_in = [world](int64_t number) { return ((number % world) + world) % world; };  // of negatives too
    const int64_t most_rank = rank_in(packed[2 * i]);
    const int64_t least_rank = rank_in(packed[2 * i + 1]);
    reduced.extremes[i] = {-(packed[2 * i + 1] - least_rank) / world, least_rank, (packed[2 * i] - most_rank) / world,
                           most_rank};
  }
  unpack_arguments(packed, reduced);
  reduced.num_active = packed[kSum];
  const auto placements = packed.begin() + static_cast<int64_t>(placements_start);
  reduced.with_grad = SlotSet({packed.begin() + kSetStart, placements});
  reduced.placements = SlotSet({placements, packed.begin() + piggybacks_start});
  reduced.piggybacks.assign(packed.begin() + piggybacks_start, packed.end());
  return reduced;
}

void Agreement::take_largest(std::vector<uint8_t>& bytes) {
  if (!control_.group || bytes.empty()) return;
  ask([&] { with_tensor(bytes, at::kByte, all_max()); });
}

void Agreement::all_reduce(at::Tensor values, Combine combine) {
  ask([&] { small_.run(values, combine); });
}

void Agreement::broadcast(std::vector<at::Tensor>& tensors, int64_t root) {
  c10d::BroadcastOptions options;
  options.rootRank = root;
  const auto start = [&] { return control_.group->broadcast(tensors, options); };
  control_.await({control_.needing(kUnknownRank, start)});
}

std::vector<int64_t> Agreement::from_rank_0(std::vector<int64_t> numbers) {
  if (!control_.group || numbers.empty()) return numbers;
  ask([&] { with_tensor(numbers, at::kLong, [this](std::vector<at::Tensor>& tensors) { broadcast(tensors, 0); }); });
  return numbers;
}

std::string Agreement::text_from(int64_t rank, const std::string& text) {
  if (!control_.group) return text;
  std::vector<int64_t> size{static_cast<int64_t>(text.size())};
  std::vector<uint8_t> bytes;
  ask([&] {
    with_tensor(size, at::kLong, [&](std::vector<at::Tensor>& tensors) { broadcast(tensors, rank); });
    bytes.assign(text.begin(), text.end());
    bytes.resize(size.front());
    with_tensor(bytes, at::kByte, [&](std::vector<at::Tensor>& tensors) { broadcast(tensors, rank); });
  });
  return {bytes.begin(), bytes.end()};
}

}  // namespace zx
