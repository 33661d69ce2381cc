#include "residency/peer_shards.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "locks.h"
#include "peers/pause.h"
#include "peers/poll.h"

namespace zx {

PeerShards::PeerShards(Communicator comm, std::shared_ptr<Linger> linger, std::vector<int64_t> processes,
                       std::vector<int> ranks, int num_holders, int rank, std::chrono::milliseconds timeout)
    : failure_detector_(comm.failure_detector),
      linger_(std::move(linger)),
      neighbours_(std::move(processes)),
      ranks_(std::move(ranks)),
      num_holders_(num_holders),
      rank_(rank),
      asks_others_(!others(/*neighbours=*/false, num_holders).empty()),
      timeout_(timeout) {
  if (comm.group == nullptr) return;
  server_ = std::make_unique<ShardServer>(comm.group);
  questions_ = std::make_unique<ShardQuestions>(std::move(comm));
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

void PeerShards::await_filled(const std::vector<ShardPlace>& places) const {
  for (const int peer : others(true, num_holders_)) await(peer, places.at(peer), ShardStamp::version, 0);
}

void PeerShards::add(const at::Tensor& shard, const SharedStamps& stamps) const {
  if (server_) server_->add(shard, stamps);
}

void PeerShards::stamps_changed() const {
  if (server_) server_->stamps_changed();
}

void PeerShards::come_no_more() const {
  if (server_) server_->come_no_more();
}

void PeerShards::fetch(const Question& wanted, const std::vector<ShardPlace>& places, const Target& target) const {
  std::vector<Awaited> awaited;
  for (const int peer : others(false, num_holders_)) {
    std::vector<BytePiece> pieces = target.pieces_of(peer);
    if (!pieces.empty()) awaited.push_back(ask(peer, wanted, target, std::move(pieces)));
  }
  for (const int peer : others(true, num_holders_)) {
    const ShardPlace& place = places.at(peer);
    const std::vector<BytePiece> pieces = target.pieces_of(peer);
    if (pieces.empty()) continue;
    await(peer, place, ShardStamp::version, wanted.version);
    if (wanted.stored > 0) await(peer, place, ShardStamp::stored, wanted.stored);
    failure_detector_->needing(ranks_[peer], [&] {
      if (place.mapped.defined()) {
        target.pull(peer, place.mapped);
      } else {
        neighbours_.read(ranks_[peer], place.shard, target.flat, pieces);
      }
    });
  }
  for (const Awaited& each : awaited) {
    questions_->await(each.asked);
    const auto* from = static_cast<const char*>(each.apart.defined() ? each.apart.const_data_ptr() : nullptr);
    for (const BytePiece& piece : each.pieces) {
      if (from == nullptr) break;
      std::memcpy(target.flat + piece.to, from, piece.bytes);
      from += piece.bytes;
    }
  }
}

// The answer has the pieces one after the other: a single one is received in its place.
PeerShards::Awaited PeerShards::ask(int peer, const Question& wanted, const Target& target,
                                    std::vector<BytePiece> pieces) const {
  int64_t bytes = 0;
  for (const BytePiece& piece : pieces) bytes += static_cast<int64_t>(piece.bytes);
  const at::Tensor apart = pieces.size() == 1 ? at::Tensor() : at::empty({bytes}, at::kByte);
  const at::Tensor answer =
      apart.defined() ? apart : at::from_blob(target.flat + pieces.front().to, {bytes}, at::kByte);
  const auto asked = questions_->ask(ranks_[peer], wanted, answer, target.in_part ? pieces : std::vector<BytePiece>());
  return {asked, apart, std::move(pieces)};
}

Written PeerShards::await_written(int64_t bucket, const std::vector<ShardPlace>& places, int64_t written,
                                  int64_t came) const {
  std::vector<Questions::Asked> asked;
  std::vector<at::Tensor> answers;
  Written found = Written::everywhere;
  for (const int peer : others(false, num_ranks())) {
    if (linger_ != nullptr && linger_->has_ended(ranks_[peer])) {
      found = Written::here_only;
      continue;
    }
    answers.push_back(at::empty({1}, at::kByte));
    asked.push_back(
        questions_->ask(ranks_[peer], {.bucket = bucket, .written = written, .came = came}, answers.back()));
  }
  for (const int peer : others(true, num_ranks())) {
    found = std::max(found, await_written_by(peer, places.at(peer), written, came));
  }
  for (const auto& each : asked) questions_->await(each);
  for (const at::Tensor& answer : answers) {
    found = std::max(found, static_cast<Written>(*answer.const_data_ptr<uint8_t>()));
  }
  return found;
}

// A rank that comes to synchronize once more than this one waits for it there, and writes nothing before.
Written PeerShards::await_written_by(int rank, const ShardPlace& place, int64_t written, int64_t came) const {
  Written found = Written::everywhere;
  failure_detector_->needing(ranks_[rank], [&] {
    Pause pause;
    while (true) {
      const int64_t its_came = read_stamp(rank, place, ShardStamp::came);
      const bool goes_on = (its_came > came && read_stamp(rank, place, ShardStamp::came) == its_came) ||
                           (linger_ != nullptr && linger_->has_ended(ranks_[rank]));
      const int64_t now = read_stamp(rank, place, ShardStamp::written);
      if (now >= written && read_stamp(rank, place, ShardStamp::written) == now) {  // not copied byte by byte
        found = now >= kStandsBy ? Written::one_stands_by : Written::everywhere;
        return;
      }
      if (goes_on) {
        found = Written::here_only;
        return;
      }
      if (pause.waited() > timeout_) throw std::runtime_error("timed out");
      LongWait::check();
      pause();
    }
  });
  std::atomic_thread_fence(std::memory_order_seq_cst);  // what the stamp stands for is read after it
  return found;
}

bool PeerShards::is_ahead(const std::vector<ShardPlace>& places, int64_t written, int64_t came) const {
  if (places.empty()) return false;  // the constructor is not through
  for (const int peer : others(true, num_ranks())) {
    const auto is_over = [&](ShardStamp stamp, int64_t own) {
      const int64_t its = read_stamp(peer, places.at(peer), stamp);
      return its > own && read_stamp(peer, places.at(peer), stamp) == its;  // not copied byte by byte
    };
    try {
      if (is_over(ShardStamp::written, written) || is_over(ShardStamp::came, came)) return true;
    } catch (const std::exception&) {
      continue;
    }
  }
  return false;
}

int64_t PeerShards::read_stamp(int rank, const ShardPlace& place, ShardStamp stamp) const {
  int64_t value = 0;
  neighbours_.read(ranks_[rank], place.stamps + static_cast<size_t>(stamp) * sizeof(value), &value, sizeof(value));
  return value;
}

int64_t PeerShards::await(int rank, const ShardPlace& place, ShardStamp stamp, int64_t value) const {
  check_may_wait("a neighbour");
  int64_t found = 0;
  failure_detector_->needing(ranks_[rank], [&] {
    // Read twice: the system need not copy eight bytes at once.
    const auto is_there = [&] {
      found = read_stamp(rank, place, stamp);
      return found >= value && read_stamp(rank, place, stamp) == found;
    };
    Pause pause;
    while (!is_there()) {
      if (found == kNeverFilled) throw std::runtime_error("it has raised before it had these values");
      if (linger_ != nullptr && linger_->has_ended(ranks_[rank]) && !is_there()) throw std::runtime_error(kHasEnded);
      if (pause.waited() > timeout_) throw std::runtime_error("timed out");
      LongWait::check();
      pause();
    }
  });
  std::atomic_thread_fence(std::memory_order_seq_cst);  // what the stamp stands for is read after it
  return found;
}

void PeerShards::say_left() const {
  for (const int peer : others(false, num_ranks())) questions_->say_left(ranks_[peer]);
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
