#include "residency/shard_server.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "params/read_guard.h"

namespace zx {

ShardServer::ShardServer(const Group& group)
    : server_(group, Question::kKind, "zerox shards", [this](HeardQuestion heard) { hear(std::move(heard)); }) {}

void ShardServer::add(at::Tensor shard, const SharedStamps& stamps) {
  const std::lock_guard lock(mutex_);
  shards_.push_back({std::move(shard), stamps});
}

void ShardServer::stamps_changed() {
  const ReadGuard::Pause pause;
  const std::lock_guard lock(mutex_);
  answer_what_can_be();
}

void ShardServer::come_no_more() {
  const ReadGuard::Pause pause;
  const std::lock_guard lock(mutex_);
  comes_no_more_ = true;
  answer_what_can_be();
}

bool ShardServer::is_asked_for_writes() {
  const std::lock_guard lock(mutex_);
  return std::any_of(kept_.begin(), kept_.end(),
                     [](const HeardQuestion& heard) { return !Question::of(heard.what).wants_shard; });
}

void ShardServer::hear(HeardQuestion heard) {
  const ReadGuard::Pause pause;
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(heard));
  answer_what_can_be();
}

// Called under the lock.
void ShardServer::answer_what_can_be() {
  std::erase_if(kept_, [this](const HeardQuestion& heard) {
    if (!can_be_answered(Question::of(heard.what))) return false;
    server_.answer(heard.rank, heard.tag, answer_to(heard));
    return true;
  });
}

bool ShardServer::can_be_answered(const Question& question) const {
  if (question.bucket >= static_cast<int64_t>(shards_.size())) return false;
  const SharedStamps& stamps = shards_[question.bucket].stamps;
  if (stamps.get(ShardStamp::came) > question.came || (comes_no_more_ && !question.wants_shard)) return true;
  return stamps.get(ShardStamp::version) >= question.version && stamps.get(ShardStamp::written) >= question.written &&
         stamps.get(ShardStamp::stored) >= question.stored;
}

at::Tensor ShardServer::answer_to(const HeardQuestion& heard) const {
  const Question question = Question::of(heard.what);
  if (!question.wants_shard) {
    const int64_t written = shards_[question.bucket].stamps.get(ShardStamp::written);
    const Written found = written < question.written ? Written::here_only
                          : written >= kStandsBy     ? Written::one_stands_by
                                                     : Written::everywhere;
    return at::full({1}, static_cast<int64_t>(found), at::kByte);
  }
  const at::Tensor& shard = shards_[question.bucket].values;
  const std::vector<int64_t>& pieces = heard.rest;
  if (pieces.empty()) return shard;
  int64_t bytes = 0;
  for (size_t i = 0; i < pieces.size(); i += 2) bytes += pieces[i + 1];
  const at::Tensor packed = at::empty({bytes}, at::kByte);
  auto* to = static_cast<char*>(packed.mutable_data_ptr());
  for (size_t i = 0; i < pieces.size(); i += 2) {
    std::memcpy(to, static_cast<const char*>(shard.const_data_ptr()) + pieces[i], pieces[i + 1]);
    to += pieces[i + 1];
  }
  return packed;
}

}  // namespace zx
