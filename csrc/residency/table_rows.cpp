#include "residency/table_rows.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "torch_internals.h"

namespace zx {
namespace {

constexpr size_t kPage = 4096;  // the smallest there is; larger ones are counted as several

void add(std::vector<BytePiece>& pieces, const BytePiece& next) {
  if (!pieces.empty()) {
    BytePiece& last = pieces.back();
    if (last.from + last.bytes == next.from && last.to + last.bytes == next.to) {
      last.bytes += next.bytes;
      return;
    }
  }
  pieces.push_back(next);
}

template <typename Index>
void add_missing(const Index* indices, int64_t count, const std::vector<bool>& here, std::vector<int64_t>& rows) {
  const auto num_rows = static_cast<int64_t>(here.size());
  for (int64_t i = 0; i < count; ++i) {
    const auto row = static_cast<int64_t>(indices[i]);
    if (row >= 0 && row < num_rows && !here[row]) rows.push_back(row);
  }
}

bool has_indices(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.key_set().has(c10::DispatchKey::Python) &&
         (tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong);
}

}  // namespace

TableRows::TableRows(RowOwners owners, size_t row_bytes, std::shared_ptr<AddressRange> range)
    : owners_(std::move(owners)),
      row_bytes_(row_bytes),
      range_(std::move(range)),
      here_(owners_.num_rows()),
      pages_(range_ == nullptr ? 0 : (range_->bytes() + kPage - 1) / kPage) {}

std::vector<BytePiece> TableRows::shard_of(int rank) const {
  std::vector<BytePiece> pieces;
  const int64_t owned = owners_.owned_by(rank);
  for (int64_t place = 0; place < owned; place += kBlockRows) {
    const int64_t count = std::min(kBlockRows, owned - place);
    add(pieces, {place * row_bytes_, owners_.row_at(rank, place) * row_bytes_, count * row_bytes_});
  }
  return pieces;
}

std::vector<BytePiece> TableRows::pieces_of(int rank, const std::vector<int64_t>& rows) const {
  std::vector<BytePiece> pieces;
  for (const int64_t row : rows) {
    if (owners_.owner_of(row) != rank) continue;
    add(pieces, {owners_.place_of(row) * row_bytes_, row * row_bytes_, row_bytes_});
  }
  return pieces;
}

std::vector<int64_t> TableRows::all() const {
  std::vector<int64_t> rows(here_.size());
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

std::vector<RowMoves> TableRows::moves_by_owner(int num_owners, const std::vector<int64_t>& rows) const {
  std::vector<RowMoves> moves(num_owners);
  for (const int64_t row : rows) {
    RowMoves& from_owner = moves[owners_.owner_of(row)];
    from_owner.from.push_back(owners_.place_of(row));
    from_owner.to.push_back(row);
  }
  return moves;
}

std::vector<int64_t> TableRows::missing(const at::Tensor& indices) const {
  const at::Tensor dense = indices.contiguous();
  std::vector<int64_t> rows;
  if (dense.scalar_type() == at::kInt) {
    add_missing(dense.const_data_ptr<int32_t>(), dense.numel(), here_, rows);
  } else {
    add_missing(dense.const_data_ptr<int64_t>(), dense.numel(), here_, rows);
  }
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

std::pair<size_t, size_t> TableRows::pages_of(int64_t row) const {
  const size_t start = static_cast<size_t>(row) * row_bytes_;
  return {start / kPage, (start + row_bytes_ - 1) / kPage + 1};
}

// Rows ascend, so a page comes again only right after itself.
template <typename Do>
void TableRows::for_new_pages(const std::vector<int64_t>& rows, const Do& action) const {
  size_t done = 0;
  for (const int64_t row : rows) {
    const auto [start, stop] = pages_of(row);
    for (size_t page = std::max(start, done); page < stop; ++page) {
      if (!pages_[page]) action(page);
    }
    done = std::max(done, stop);
  }
}

size_t TableRows::more_bytes(const std::vector<int64_t>& rows) const {
  if (!has_pages()) return has_some_ ? 0 : here_.size() * row_bytes_;
  size_t count = 0;
  for_new_pages(rows, [&](size_t /*page*/) { ++count; });
  return count * kPage;
}

size_t TableRows::note(const std::vector<int64_t>& rows) {
  const size_t bytes = more_bytes(rows);
  if (has_pages()) {
    for_new_pages(rows, [this](size_t page) { pages_[page] = true; });
    range_->count_more(bytes);
  }
  for (const int64_t row : rows) here_[row] = true;
  has_some_ = has_some_ || !rows.empty() || !has_pages();
  return bytes;
}

int64_t TableRows::bytes_of_others(int rank, const std::vector<int64_t>& rows) const {
  const auto is_others = [&](int64_t row) { return owners_.owner_of(row) != rank; };
  return std::count_if(rows.begin(), rows.end(), is_others) * static_cast<int64_t>(row_bytes_);
}

void TableRows::spoil(const std::vector<int64_t>& rows) {
  for (const int64_t row : rows) std::memset(range_->data() + row * row_bytes_, 0xff, row_bytes_);
}

void TableRows::forget() {
  if (!has_some_) return;
  here_.assign(here_.size(), false);
  pages_.assign(pages_.size(), false);
  has_some_ = false;
}

const at::Tensor* looked_up(const ReadGuard::Use& use, const at::Tensor& table, const Room& room, size_t row_bytes) {
  for (const internals::Lookup& lookup : internals::kLookups) {
    if (use.argument() != lookup.table || std::strcmp(use.name(), lookup.name) != 0) continue;
    const c10::IValue* indices = use.input(lookup.indices);
    const bool is_whole = table.dim() == 2 && table.is_contiguous() && table.nbytes() == room.bytes() &&
                          table.nbytes() == table.size(0) * row_bytes;
    if (!is_whole || indices == nullptr || !indices->isTensor() || !has_indices(indices->toTensor())) return nullptr;
    return &indices->toTensor();
  }
  return nullptr;
}

}  // namespace zx
