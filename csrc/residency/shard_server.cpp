#include "residency/shard_server.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <pthread.h>

#include <chrono>
#include <cstring>
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
  check_may_wait("the end of a server");
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
  if (!receive(backend_->recvAnysource(received, AskedBy::tag_of_questions()))) return !is_stopping();
  AskedBy asked = AskedBy::unpack(received[0]);
  if (asked.question.num_pieces > 0) {
    asked.pieces = at::empty({asked.question.num_pieces, 2}, at::kLong);
    std::vector<at::Tensor> pieces{asked.pieces};
    if (!receive(backend_->recv(pieces, asked.rank, asked.tag_of_pieces()))) return !is_stopping();
  }
  const std::lock_guard lock(mutex_);
  if (asked.tag == AskedBy::kFailureRecord) {
    askers_.at(asked.rank).has_left = true;
  } else {
    kept_.push_back(std::move(asked));
    answer_what_can_be();
  }
  return true;
}

// Whether it has arrived.
bool ShardServer::receive(const Work& work) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return false;
    listening_ = work;
  }
  check_may_wait("a question");
  const bool is_there = work->wait(kForever);
  const std::lock_guard lock(mutex_);
  listening_ = nullptr;
  return is_there && !stopping_;
}

bool ShardServer::is_stopping() const {
  const std::lock_guard lock(mutex_);
  return stopping_;
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

at::Tensor ShardServer::answer_to(const AskedBy& asked) const {
  if (!asked.question.wants_shard) {
    const bool stands_by = shards_[asked.question.bucket].stamps.get(ShardStamp::written) >= kStandsBy;
    return at::full({1}, stands_by ? 1 : 0, at::kByte);
  }
  const at::Tensor& shard = shards_[asked.question.bucket].values;
  if (!asked.pieces.defined()) return shard;
  int64_t bytes = 0;
  const int64_t* pieces = asked.pieces.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < asked.pieces.size(0); ++i) bytes += pieces[2 * i + 1];
  const at::Tensor packed = at::empty({bytes}, at::kByte);
  auto* to = static_cast<char*>(packed.mutable_data_ptr());
  for (int64_t i = 0; i < asked.pieces.size(0); ++i) {
    std::memcpy(to, static_cast<const char*>(shard.const_data_ptr()) + pieces[2 * i], pieces[2 * i + 1]);
    to += pieces[2 * i + 1];
  }
  return packed;
}

void ShardServer::answer(const AskedBy& asked) {
  auto& answers = askers_.at(asked.rank).answers;
  if (asked.tag >= static_cast<int>(answers.size())) answers.resize(asked.tag + 1);
  std::vector<at::Tensor> message{answer_to(asked)};
  try {
    answers[asked.tag] = {backend_->send(message, asked.rank, asked.tag_of_answer()), message[0]};
  } catch (const std::exception&) {  // the rank is gone, and waits for nothing
  }
}

}  // namespace zx
