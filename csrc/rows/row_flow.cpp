#include "rows/row_flow.h"

#include <ATen/ops/_indices.h>
#include <ATen/ops/_values.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "check.h"

namespace zx {
namespace {

// As rows, or nothing if it is none.
std::optional<LocalRows> rows_of(const at::Tensor& grad, const at::Tensor& param) {
  if (!grad.defined()) {
    return LocalRows{at::empty({0}, at::kLong), at::empty({0, param.size(1)}, at::kFloat), true};
  }
  const bool fits = grad.layout() == at::kSparse && grad.scalar_type() == at::kFloat && grad.sizes() == param.sizes() &&
                    grad.sparse_dim() == 1;
  if (!fits) return std::nullopt;
  return LocalRows{grad._indices().select(0, 0).contiguous(), grad._values().detach().contiguous(),
                   grad.is_coalesced()};
}

uint32_t version_of(const at::Tensor& grad) { return grad.defined() ? static_cast<uint32_t>(grad._version()) : 0; }

}  // namespace

RowFlow::RowFlow(std::shared_ptr<PeerMessages> messages, Neighbours neighbours)
    : messages_(std::move(messages)),
      neighbours_(std::move(neighbours)),
      tables_(messages_->rank(), messages_->world()) {}

void RowFlow::add(const TableSpec& spec, at::Tensor param) {
  tables_.add(spec);
  params_.push_back(std::move(param));
  seen_.emplace_back();
  landed_.emplace_back();
}

RowChange RowFlow::change() const {
  RowChange most = RowChange::unchanged;
  for (size_t t = 0; t < params_.size(); ++t) {
    const at::Tensor& grad = params_[t].grad();
    const Seen& seen = seen_[t];
    const bool is_same = seen.is_seen && seen.grad.unsafeGetTensorImpl() == grad.unsafeGetTensorImpl();
    const bool is_as_seen = is_same && seen.version == version_of(grad);
    const RowChange change = is_as_seen ? RowChange::unchanged : is_same ? RowChange::added : RowChange::replaced;
    most = std::max(most, change);
  }
  return most;
}

bool RowFlow::pack() {
  if (change() == RowChange::unchanged) return true;
  std::vector<LocalRows> grads;
  for (const at::Tensor& param : params_) {
    std::optional<LocalRows> rows = rows_of(param.grad(), param);
    if (!rows) return false;
    grads.push_back(*std::move(rows));
  }
  try {
    packed_ = tables_.pack(grads);
  } catch (const std::out_of_range&) {
    return false;
  }
  return true;
}

void RowFlow::forget() {
  seen_.assign(seen_.size(), Seen{});
  landed_.assign(landed_.size(), std::nullopt);
}

void RowFlow::note_seen() {
  for (size_t t = 0; t < params_.size(); ++t) {
    seen_[t] = {params_[t].grad(), version_of(params_[t].grad()), true};
  }
}

// By rank, int64: what has changed, of each table whether there is a gradient, and how many rows each owner gets. In
// the memory of neighbours also where these are.
at::Tensor RowFlow::tell(RowChange change) {
  std::vector<int64_t> own{static_cast<int64_t>(change)};
  for (const at::Tensor& param : params_) own.push_back(param.grad().defined() ? 1 : 0);
  const auto* counts = packed_.counts.const_data_ptr<int64_t>();
  own.insert(own.end(), counts, counts + packed_.counts.numel());
  const auto width = static_cast<int64_t>(own.size());
  const bool reads = neighbours_.world() > 0;
  if (reads) own.push_back(packed_.address());
  const at::Tensor header = at::empty({static_cast<int64_t>(own.size())}, at::kLong);
  std::copy(own.begin(), own.end(), header.mutable_data_ptr<int64_t>());
  const std::vector<at::Tensor> headers = messages_->to_all(header);
  lent_ = reads ? packed_.words : std::vector<at::Tensor>{};
  addresses_.clear();
  at::Tensor told = at::empty({messages_->world(), width}, at::kLong);
  auto* next = told.mutable_data_ptr<int64_t>();
  for (const at::Tensor& of_rank : headers) {
    const auto* numbers = of_rank.const_data_ptr<int64_t>();
    next = std::copy_n(numbers, width, next);
    addresses_.push_back(reads ? numbers[width] : 0);
  }
  return told;
}

RowChange RowFlow::exchange(bool goes_on) {
  if (params_.empty()) return RowChange::unchanged;
  const RowChange own = change();
  const auto extremes = [](const at::Tensor& told) {
    const auto* numbers = told.const_data_ptr<int64_t>();
    std::pair found{numbers[0], numbers[0]};
    for (int64_t rank = 1; rank < told.size(0); ++rank) {
      found = {std::min(found.first, numbers[rank * told.size(1)]),
               std::max(found.second, numbers[rank * told.size(1)])};
    }
    return found;
  };
  at::Tensor told = tell(own);
  const auto [least, most] = extremes(told);
  const auto change = static_cast<RowChange>(most);
  if (change != RowChange::unchanged) {
    if (static_cast<RowChange>(least) == RowChange::unchanged) {  // a rank has not packed what it has
      if (own == RowChange::unchanged) {
        seen_.assign(seen_.size(), Seen{});
        TORCH_INTERNAL_ASSERT(pack());
      }
      told = tell(own);
    }
    land(told);
    note_seen();
  }
  packed_.words.clear();
  if (!goes_on) close();
  return change;
}

void RowFlow::land(const at::Tensor& told) {
  const auto num_tables = static_cast<int64_t>(params_.size());
  counts_ = told.narrow(1, 1 + num_tables, told.size(1) - 1 - num_tables).contiguous();
  std::vector<LandedRows> landed = tables_.land(collect(), counts_);
  const auto* numbers = told.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < num_tables; ++t) {
    landed_[t].reset();
    bool is_present = false;
    for (int64_t rank = 0; rank < told.size(0); ++rank) is_present |= numbers[rank * told.size(1) + 1 + t] != 0;
    if (is_present) landed_[t] = std::move(landed[t]);
  }
}

// By rank: the words that it had for this one.
std::vector<at::Tensor> RowFlow::collect() {
  const std::vector<WordSpan> spans = tables_.words_from_each(counts_);
  if (neighbours_.world() == 0) {
    std::vector<int64_t> numels;
    for (const WordSpan& span : spans) numels.push_back(span.count);
    return messages_->swap(packed_.words, numels);
  }
  std::vector<at::Tensor> found = packed_.words;
  const int own = messages_->rank();
  for (int rank = 0; rank < messages_->world(); ++rank) {
    if (rank == own) continue;
    messages_->count(packed_.words[rank]);
    found[rank] = at::empty({spans[rank].count}, at::kInt);
    if (spans[rank].count == 0) continue;
    const auto address = static_cast<uint64_t>(addresses_[rank]) + spans[rank].start * found[rank].element_size();
    messages_->line().needing(
        rank, [&] { neighbours_.read(rank, address, found[rank].mutable_data_ptr(), found[rank].nbytes()); });
  }
  return found;
}

void RowFlow::update(const std::vector<RowRule>& rules) {
  std::vector<bool> present;
  bool some = false;
  for (const auto& landed : landed_) {
    present.push_back(landed.has_value());
    some |= present.back();
  }
  if (!some) return close();
  const at::Tensor words = tables_.update(params_, landed_, rules, counts_);
  if (messages_->world() > 1) {
    const std::vector<at::Tensor> sent(messages_->world(), words);
    const std::vector<at::Tensor> received = messages_->swap(sent, tables_.updated_words(present, counts_));
    lent_.clear();
    tables_.put(params_, present, counts_, received);
  }
  for (size_t t = 0; t < params_.size(); ++t) {
    if (present[t]) params_[t].unsafeGetTensorImpl()->bump_version();
  }
}

void RowFlow::close() {
  if (lent_.empty()) return;
  messages_->to_all(at::zeros({1}, at::kByte));
  lent_.clear();
}

}  // namespace zx
