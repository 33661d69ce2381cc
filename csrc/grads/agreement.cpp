#include "grads/agreement.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "check.h"

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

// A number that each rank states, and the place of its extremes over the ranks.
struct Field {
  int64_t (*said)(const Statement&);
  Extreme Verdict::* extremes;
};
constexpr Field kFields[] = {
    {[](const Statement& s) { return static_cast<int64_t>(s.place); }, &Verdict::place},
    {[](const Statement& s) { return s.rounds; }, &Verdict::rounds},
    // Ranks without a backward of their own don't limit the others: they join whatever the others launched.
    {[](const Statement& s) { return s.own_rounds > 0 ? s.rounds : kNoBackward; }, &Verdict::own_rounds},
    {[](const Statement& s) { return static_cast<int64_t>(s.failed); }, &Verdict::failed},
    {[](const Statement& s) { return static_cast<int64_t>(s.unsent); }, &Verdict::unsent},
    {[](const Statement& s) { return static_cast<int64_t>(s.changed); }, &Verdict::changed},
    {[](const Statement& s) { return s.adoptions; }, &Verdict::adoptions},
    {[](const Statement& s) { return static_cast<int64_t>(s.scaled); }, &Verdict::scaled},
    {[](const Statement& s) { return static_cast<int64_t>(s.proposes); }, &Verdict::proposes},
};
constexpr size_t kNumFields = std::size(kFields);
static_assert(sizeof(Verdict) == kNumFields * sizeof(Extreme) + sizeof(SlotSet));

// The extremes come first, the set comes last.
void combine_statements(at::Tensor& values, const at::Tensor& theirs) {
  auto* mine = values.mutable_data_ptr<int64_t>();
  const auto* other = theirs.const_data_ptr<int64_t>();
  for (size_t i = 0; i < 2 * kNumFields; ++i) mine[i] = std::max(mine[i], other[i]);
  for (int64_t i = 2 * kNumFields; i < values.numel(); ++i) mine[i] |= other[i];
}

}  // namespace

const char* name_of(int64_t place) {
  constexpr const char* kNames[] = {"the end of backward()", "step()", "clip_grad_norm_()", "synchronize()",
                                    "GradScaler.unscale_()"};
  return kNames[place];
}

template <class Question>
void Agreement::ask(const Question& question) {
  try {
    question();
  } catch (const std::exception& error) {
    const std::string awaited = trouble_();
    TORCH_CHECK(false, "zerox: in ", where_, " a rank did not answer: ", reason_of(error), "\n",
                awaited.empty() ? "no bucket is awaited: all gradients that were sent have arrived" : awaited);
  }
}

Verdict Agreement::agree(const Statement& s, const char* where) {
  where_ = where != nullptr ? where : name_of(static_cast<int64_t>(s.place));
  const int64_t world = control_.group ? control_.group->getSize() : 1;
  const int64_t rank = control_.group ? control_.group->getRank() : 0;
  // A maximum also carries the rank that it came from, and a minimum is the maximum of the negatives.
  std::vector<int64_t> packed;
  for (const Field& field : kFields) {
    packed.push_back(field.said(s) * world + rank);
    packed.push_back(-field.said(s) * world + rank);
  }
  const std::vector<int64_t>& with_grad = s.with_grad.words();
  packed.insert(packed.end(), with_grad.begin(), with_grad.end());
  if (control_.group) {
    ask([&] {
      with_tensor(packed, at::kLong,
                  [this](std::vector<at::Tensor>& tensors) { small_.run(tensors[0], combine_statements); });
    });
    control_.whereabouts->met(name_of(static_cast<int64_t>(s.place)));
  }
  Verdict verdict{};
  for (size_t i = 0; i < kNumFields; ++i) {
    const int64_t most_rank = packed[2 * i] % world;
    const int64_t least_rank = ((packed[2 * i + 1] % world) + world) % world;
    Extreme& found = verdict.*kFields[i].extremes;
    found = {-(packed[2 * i + 1] - least_rank) / world, least_rank, packed[2 * i] / world, most_rank};
  }
  verdict.with_grad = SlotSet({packed.begin() + 2 * kNumFields, packed.end()});
  return verdict;
}

void Agreement::take_largest(std::vector<uint8_t>& bytes) {
  if (!control_.group || bytes.empty()) return;
  ask([&] { with_tensor(bytes, at::kByte, all_max()); });
}

void Agreement::all_reduce(at::Tensor values, Combine combine) {
  ask([&] { small_.run(values, combine); });
}

std::vector<int64_t> Agreement::from_rank_0(std::vector<int64_t> numbers) {
  if (!control_.group || numbers.empty()) return numbers;
  ask([&] {
    with_tensor(numbers, at::kLong, [this](std::vector<at::Tensor>& tensors) {
      const auto start = [&] { return control_.group->broadcast(tensors); };
      control_.whereabouts->await({control_.whereabouts->needing(kUnknownRank, start)});
    });
  });
  return numbers;
}

}  // namespace zx
