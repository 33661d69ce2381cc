#include "params/peer_shards.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <stdexcept>
#include <thread>

namespace zx {
namespace {

using std::chrono::microseconds;

// A rank is late by a few of these at most, if all have cores of their own.
constexpr int kYields = 64;
constexpr microseconds kFirstPause{20};
constexpr microseconds kLongestPause{1000};

}  // namespace

PeerShards::PeerShards(Line line, std::vector<int64_t> processes, std::vector<int> ranks, int num_holders, int rank,
                       std::chrono::milliseconds timeout)
    : whereabouts_(line.whereabouts),
      neighbours_(std::move(processes)),
      ranks_(std::move(ranks)),
      num_holders_(num_holders),
      rank_(rank),
      asks_others_(!others(/*neighbours=*/false, num_holders).empty()),
      timeout_(timeout) {
  if (line.group == nullptr) return;
  server_ = std::make_unique<ShardServer>(line.group);
  questions_ = std::make_unique<ShardQuestions>(std::move(line));
}

// Of the first `count`, from the next one on, so that no rank is everybody's first.
std::vector<int> PeerShards::others(bool neighbours, int count) const {
  std::vector<int> found;
  for (int step = 1; step < count; ++step) {
    const int peer = (rank_ + step) % count;
    if (neighbours_.has(ranks_[peer]) == neighbours) found.push_back(peer);
  }
  return found;
}

void PeerShards::add(const at::Tensor& shard, const SharedStamps& stamps) const {
  if (server_) server_->add(shard, stamps);
}

void PeerShards::stamps_changed() const {
  if (server_) server_->stamps_changed();
}

void PeerShards::fetch(const Question& wanted, const std::vector<ShardPlace>& places, const Target& target) const {
  std::vector<ShardQuestions::Asked> asked;
  for (const int peer : others(false, num_holders_)) {
    const at::Tensor answer =
        at::from_blob(target.flat + peer * target.shard_bytes, {static_cast<int64_t>(target.shard_bytes)}, at::kByte);
    asked.push_back(questions_->ask(ranks_[peer], wanted, answer));
  }
  for (const int peer : others(true, num_holders_)) {
    const ShardPlace& place = places.at(peer);
    await(peer, place, ShardStamp::version, wanted.version);
    if (wanted.stored > 0) await(peer, place, ShardStamp::stored, wanted.stored);
    whereabouts_->needing(ranks_[peer], [&] {
      if (place.mapped.defined()) {
        target.pull(peer, place.mapped);
      } else {
        neighbours_.read(ranks_[peer], place.shard, target.flat + peer * target.shard_bytes, target.shard_bytes);
      }
    });
  }
  for (const auto& each : asked) questions_->await(each);
}

void PeerShards::await_written(int64_t bucket, const std::vector<ShardPlace>& places, int64_t written) const {
  std::vector<ShardQuestions::Asked> asked;
  for (const int peer : others(false, num_ranks())) {
    asked.push_back(questions_->ask(ranks_[peer], {.bucket = bucket, .written = written}, at::empty({1}, at::kByte)));
  }
  for (const int peer : others(true, num_ranks())) await(peer, places.at(peer), ShardStamp::written, written);
  for (const auto& each : asked) questions_->await(each);
}

int64_t PeerShards::read_stamp(int rank, const ShardPlace& place, ShardStamp stamp) const {
  int64_t value = 0;
  neighbours_.read(ranks_[rank], place.stamps + static_cast<size_t>(stamp) * sizeof(value), &value, sizeof(value));
  return value;
}

void PeerShards::await(int rank, const ShardPlace& place, ShardStamp stamp, int64_t value) const {
  whereabouts_->needing(ranks_[rank], [&] {
    const auto deadline = std::chrono::steady_clock::now() + timeout_;
    microseconds pause = kFirstPause;
    // Read twice: the system need not copy eight bytes at once.
    const auto is_there = [&] {
      return read_stamp(rank, place, stamp) >= value && read_stamp(rank, place, stamp) >= value;
    };
    for (int64_t tries = 0; !is_there(); ++tries) {
      if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("timed out");
      if (tries < kYields) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(pause);
        pause = std::min(2 * pause, kLongestPause);
      }
    }
  });
  std::atomic_thread_fence(std::memory_order_seq_cst);  // what the stamp stands for is read after it
}

void PeerShards::say_left() const {
  for (const int peer : others(false, num_ranks())) questions_->say_farewell(ranks_[peer]);
}

bool PeerShards::has_left(int rank, const ShardPlace& place) const {
  if (!neighbours_.has(ranks_[rank])) return server_->has_left(ranks_[rank]);
  try {
    return read_stamp(rank, place, ShardStamp::left) != 0;
  } catch (const std::exception&) {
    return true;
  }
}

}  // namespace zx
