// State of ranks whose memory can be read.
#pragma once

#include <optional>
#include <utility>

#include "peers/state_reader.h"
#include "peers/state_source.h"

namespace zx {

class StatesInMemory final : public StateSource {
 public:
  explicit StatesInMemory(StateReader reader) : reader_(std::move(reader)) {}

  std::optional<Directory> look(int rank, int64_t version, LongWait& /*wait*/) override {
    const auto stamp = reader_.stamp_since(rank, version);
    auto addresses = stamp ? reader_.addresses(rank, *stamp) : std::nullopt;
    if (!addresses) return std::nullopt;
    return Directory{*stamp, addresses->size(), std::move(*addresses)};
  }

  bool read(int rank, const Directory& from, size_t place, size_t start, const at::Tensor& into,
            LongWait& /*wait*/) override {
    const auto address = static_cast<uint64_t>(from.addresses.at(place)) + start;
    return reader_.read(rank, from.stamp, address, into.mutable_data_ptr(), into.nbytes());
  }

 private:
  const StateReader reader_;
};

}  // namespace zx
