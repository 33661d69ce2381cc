#include <ATen/ops/empty.h>

#include <cstring>
#include <limits>

#include "rows/checks.h"
#include "rows/row_tables.h"

namespace zx {
namespace {

constexpr int32_t kNoPlace = std::numeric_limits<int32_t>::max();

// What one rank sent of one table.
struct Source {
  std::vector<int32_t> places;
  const float* values;
  size_t next = 0;

  int32_t place() const { return next < places.size() ? places[next] : kNoPlace; }
};

}  // namespace

const int64_t* RowTables::checked(const at::Tensor& counts) const {
  check_array(counts, at::kLong, world_ * world_ * static_cast<int64_t>(tables_.size()), counts, "RowTables", "counts");
  return counts.const_data_ptr<int64_t>();
}

std::vector<WordSpan> RowTables::words_from_each(const at::Tensor& counts) const {
  const int64_t* count_of = checked(counts);
  std::vector<WordSpan> found(world_, WordSpan{0, 0});
  for (WordSpan& span : found) {
    for (const Table& table : tables_) {
      for (int64_t owner = 0; owner <= rank_; ++owner) {
        (owner < rank_ ? span.start : span.count) +=
            message_words(count_of[owner], table.owners.owned_by(owner), table.width);
      }
      count_of += world_;
    }
  }
  return found;
}

std::vector<ReducedRows> RowTables::reduce(const std::vector<at::Tensor>& words, const at::Tensor& counts) const {
  const std::vector<WordSpan> spans = words_from_each(counts);
  const int64_t* count_of = checked(counts);
  std::vector<const int32_t*> next;
  for (int64_t rank = 0; rank < world_; ++rank) {
    check_array(words.at(rank), at::kInt, spans[rank].count, counts, "RowTables", "words");
    next.push_back(words[rank].const_data_ptr<int32_t>());
  }
  std::vector<ReducedRows> reduced;
  for (size_t t = 0; t < tables_.size(); ++t) {
    std::vector<int64_t> of_ranks;
    for (int64_t rank = 0; rank < world_; ++rank) {
      of_ranks.push_back(count_of[(rank * tables_.size() + t) * world_ + rank_]);
    }
    reduced.push_back(reduce_one(tables_[t], next, of_ranks));
    for (int64_t rank = 0; rank < world_; ++rank) {
      next[rank] += message_words(of_ranks[rank], tables_[t].owners.owned_by(rank_), tables_[t].width);
    }
  }
  return reduced;
}

ReducedRows RowTables::reduce_one(const Table& table, const std::vector<const int32_t*>& words,
                                  const std::vector<int64_t>& counts) const {
  const int64_t width = table.width;
  const int64_t owned = table.owners.owned_by(rank_);
  std::vector<Source> sources(world_);
  int64_t most = 0;
  for (int64_t rank = 0; rank < world_; ++rank) {
    read_names(words[rank], counts[rank], counts[rank], rank_, table.owners, sources[rank].places);
    sources[rank].values = reinterpret_cast<const float*>(words[rank] + name_words(counts[rank], owned));
    most += counts[rank];
  }
  most = std::min(most, owned);
  ReducedRows reduced{.rows = at::empty({most}, at::kLong),
                      .places = at::empty({most}, at::kLong),
                      .values = at::empty({most, width}, at::kFloat)};
  auto* rows = reduced.rows.mutable_data_ptr<int64_t>();
  auto* places = reduced.places.mutable_data_ptr<int64_t>();
  auto* const values = reduced.values.mutable_data_ptr<float>();
  int64_t count = 0;
  while (true) {
    int32_t place = kNoPlace;
    for (const Source& source : sources) place = std::min(place, source.place());
    if (place == kNoPlace) break;
    float* __restrict sums = values + count * width;
    bool is_first = true;
    for (Source& source : sources) {
      if (source.place() != place) continue;
      const float* __restrict more = source.values + static_cast<int64_t>(source.next++) * width;
      if (is_first) {
        std::memcpy(sums, more, static_cast<size_t>(width) * sizeof(float));
      } else {
        for (int64_t k = 0; k < width; ++k) sums[k] += more[k];
      }
      is_first = false;
    }
    if (table.divisor != 1.0F) {
      for (int64_t k = 0; k < width; ++k) sums[k] /= table.divisor;
    }
    rows[count] = table.owners.row_at(rank_, place);
    places[count++] = place;
  }
  return {reduced.rows.narrow(0, 0, count), reduced.places.narrow(0, 0, count), reduced.values.narrow(0, 0, count)};
}

}  // namespace zx
