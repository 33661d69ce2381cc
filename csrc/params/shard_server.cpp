#include "params/shard_server.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <pthread.h>

#include <chrono>
#include <exception>
#include <utility>

#include "params/read_guard.h"

namespace zx {
namespace {

// A wait that runs out of time closes all connections, and nobody may ask for days.
constexpr std::chrono::hours kForever{24 * 365 * 10};
constexpr std::chrono::milliseconds kAfterFailure{10};
constexpr int kMostFailures = 100;

}  // namespace

ShardServer::ShardServer(const Group& group)
    : group_(group), backend_(group->getBackend(c10::DeviceType::CPU)), askers_(group->getSize()) {
  thread_ = std::thread([this] { serve(); });
}

ShardServer::~ShardServer() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (listening_) listening_->abort();
  }
  thread_.join();
}

void ShardServer::add(at::Tensor shard, const SharedStamps& stamps) {
  const std::lock_guard lock(mutex_);
  shards_.push_back({std::move(shard), stamps});
}

void ShardServer::stamps_changed() {
  const ReadGuard::Pause pause;
  const std::lock_guard lock(mutex_);
  answer_what_can_be();
}

bool ShardServer::has_left(int rank) const {
  const std::lock_guard lock(mutex_);
  return askers_.at(rank).has_left;
}

void ShardServer::serve() {
#ifdef __linux__
  pthread_setname_np(pthread_self(), "zerox shards");
#endif
  const ReadGuard::Pause pause;
  int failures = 0;
  while (failures < kMostFailures) {
    try {
      if (!listen()) return;
      failures = 0;
    } catch (const std::exception&) {  // a rank that asked is gone, and others may ask
      ++failures;
      std::this_thread::sleep_for(kAfterFailure);
    }
  }
}

// Receives one question. Returns false when the server stops.
bool ShardServer::listen() {
  std::vector<at::Tensor> received{at::empty({AskedBy::kNumbers}, at::kLong)};
  const Work listening = backend_->recvAnysource(received, AskedBy::tag_of_questions());
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return false;
    listening_ = listening;
  }
  const bool is_there = listening->wait(kForever);
  const std::lock_guard lock(mutex_);
  listening_ = nullptr;
  if (stopping_) return false;
  if (!is_there) return true;
  const AskedBy asked = AskedBy::unpack(received[0]);
  if (asked.tag == AskedBy::kFarewell) {
    askers_.at(asked.rank).has_left = true;
  } else {
    kept_.push_back(asked);
    answer_what_can_be();
  }
  return true;
}

// Called under the lock.
void ShardServer::answer_what_can_be() {
  std::erase_if(kept_, [this](const AskedBy& asked) {
    if (!can_be_answered(asked.question)) return false;
    answer(asked);
    return true;
  });
}

bool ShardServer::can_be_answered(const Question& question) const {
  if (question.bucket >= static_cast<int64_t>(shards_.size())) return false;
  const SharedStamps& stamps = shards_[question.bucket].stamps;
  return stamps.get(ShardStamp::version) >= question.version && stamps.get(ShardStamp::written) >= question.written &&
         stamps.get(ShardStamp::stored) >= question.stored;
}

void ShardServer::answer(const AskedBy& asked) {
  auto& answers = askers_.at(asked.rank).answers;
  if (asked.tag >= static_cast<int>(answers.size())) answers.resize(asked.tag + 1);
  std::vector<at::Tensor> message{asked.question.wants_shard ? shards_[asked.question.bucket].values
                                                             : at::zeros({1}, at::kByte)};
  try {
    answers[asked.tag] = {backend_->send(message, asked.rank, asked.tag_of_answer()), message[0]};
  } catch (const std::exception&) {  // the rank is gone, and waits for nothing
  }
}

}  // namespace zx
