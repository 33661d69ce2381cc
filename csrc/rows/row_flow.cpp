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
  const at::ScalarType dtype = grad.scalar_type();
  const bool fits = grad.layout() == at::kSparse && (dtype == at::kFloat || dtype == param.scalar_type()) &&
                    grad.sizes() == param.sizes() && grad.sparse_dim() == 1;
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

void RowFlow::add(TableSpec spec, at::Tensor param, at::Tensor own) {
  spec.is_sharded = own.defined();
  tables_.add(spec);
  values_.push_back(own.defined() ? std::move(own) : param);
  params_.push_back(std::move(param));
  seen_.emplace_back();
  reduced_.emplace_back();
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
  reduced_.assign(reduced_.size(), std::nullopt);
}

void RowFlow::note_seen() {
  for (size_t t = 0; t < params_.size(); ++t) {
    seen_[t] = {params_[t].grad(), version_of(params_[t].grad()), true};
  }
}

std::vector<int64_t> RowFlow::header() {
  const auto num_counts = static_cast<int64_t>(params_.size()) * messages_->world();
  if (packed_.counts.numel() != num_counts) packed_.counts = at::zeros({num_counts}, at::kLong);  // a table is new
  std::vector<int64_t> numbers{static_cast<int64_t>(change())};
  for (const at::Tensor& param : params_) numbers.push_back(param.grad().defined() ? 1 : 0);
  const auto* counts = packed_.counts.const_data_ptr<int64_t>();
  numbers.insert(numbers.end(), counts, counts + num_counts);
  if (neighbours_.world() > 0) numbers.push_back(packed_.address());
  return numbers;
}

std::vector<int64_t> RowFlow::tell() {
  const std::vector<int64_t> numbers = header();
  const at::Tensor own = at::empty({static_cast<int64_t>(numbers.size())}, at::kLong);
  std::copy(numbers.begin(), numbers.end(), own.mutable_data_ptr<int64_t>());
  std::vector<int64_t> headers;
  for (const at::Tensor& of_rank : messages_->to_all(own)) {
    const auto* data = of_rank.const_data_ptr<int64_t>();
    headers.insert(headers.end(), data, data + of_rank.numel());
  }
  return headers;
}

RowChange RowFlow::exchange(const std::vector<int64_t>& told, bool goes_on) {
  if (params_.empty()) return RowChange::unchanged;
  std::vector<int64_t> headers = told.empty() ? tell() : told;
  const size_t size = headers.size() / messages_->world();
  int64_t least = headers.front();
  int64_t most = headers.front();
  for (size_t i = 0; i < headers.size(); i += size) {
    least = std::min(least, headers[i]);
    most = std::max(most, headers[i]);
  }
  const auto change = static_cast<RowChange>(most);
  if (change != RowChange::unchanged) {
    if (static_cast<RowChange>(least) == RowChange::unchanged) {  // a rank has not packed what it has
      if (this->change() == RowChange::unchanged) {
        seen_.assign(seen_.size(), Seen{});
        TORCH_INTERNAL_ASSERT(pack());
      }
      headers = tell();
    }
    reduce(headers);
    note_seen();
  }
  packed_.words.clear();
  if (!goes_on) close();
  return change;
}

void RowFlow::reduce(const std::vector<int64_t>& headers) {
  const auto num_tables = static_cast<int64_t>(params_.size());
  const int64_t world = messages_->world();
  const int64_t size = static_cast<int64_t>(headers.size()) / world;
  const bool reads = neighbours_.world() > 0;
  lent_ = reads ? packed_.words : std::vector<at::Tensor>{};
  counts_ = at::empty({world, num_tables, world}, at::kLong);
  auto* next = counts_.mutable_data_ptr<int64_t>();
  std::vector<int64_t> addresses;
  std::vector<bool> present(num_tables);
  for (int64_t rank = 0; rank < world; ++rank) {
    const int64_t* numbers = headers.data() + rank * size;
    for (int64_t t = 0; t < num_tables; ++t) present[t] = present[t] || numbers[1 + t] != 0;
    next = std::copy_n(numbers + 1 + num_tables, num_tables * world, next);
    if (reads) addresses.push_back(numbers[size - 1]);
  }
  std::vector<ReducedRows> reduced = tables_.reduce(collect(addresses), counts_);
  for (int64_t t = 0; t < num_tables; ++t) {
    reduced_[t].reset();
    if (present[t]) reduced_[t] = std::move(reduced[t]);
  }
}

// By rank: the words that it had for this one. `addresses`: of all that each has, where neighbours read it.
std::vector<at::Tensor> RowFlow::collect(const std::vector<int64_t>& addresses) {
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
    const auto address = static_cast<uint64_t>(addresses[rank]) + spans[rank].start * found[rank].element_size();
    messages_->comm().needing(
        rank, [&] { neighbours_.read(rank, address, found[rank].mutable_data_ptr(), found[rank].nbytes()); });
  }
  return found;
}

void RowFlow::update(const std::vector<RowRule>& rules) {
  std::vector<bool> present;
  bool some = false;
  for (const auto& reduced : reduced_) {
    present.push_back(reduced.has_value());
    some |= present.back();
  }
  if (!some) return close();
  const at::Tensor words = tables_.update(values_, reduced_, rules, counts_);
  if (tables_.tells_of(present)) {
    const std::vector<at::Tensor> sent(messages_->world(), words);
    const std::vector<at::Tensor> received = messages_->swap(sent, tables_.updated_words(present, counts_));
    lent_.clear();
    tables_.put(values_, present, counts_, received);
  }
  close();
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
