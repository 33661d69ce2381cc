#include "peers/question_server.h"

#include <ATen/ops/empty.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

namespace zx {
namespace {

// A wait that runs out of time closes all connections, and nobody may ask for days.
constexpr std::chrono::hours kForever{24 * 365 * 10};
constexpr std::chrono::milliseconds kAfterFailure{10};
constexpr int kMostFailures = 100;  // and as many as all ranks bring about when they die
constexpr int kAwaited = 4;         // questions

}  // namespace

QuestionServer::QuestionServer(const Group& group, QuestionKind kind, const char* name, Hear hear)
    : group_(group),
      backend_(group->getBackend(c10::DeviceType::CPU)),
      kind_(kind),
      name_(name),
      hear_(std::move(hear)),
      askers_(group->getSize()) {
  thread_ = std::thread([this] { serve(); });
}

QuestionServer::~QuestionServer() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (listening_) listening_->abort();
  }
  check_may_wait("the end of a server");
  thread_.join();
}

void QuestionServer::serve() {
#ifdef __linux__
  pthread_setname_np(pthread_self(), name_);
#endif
  std::deque<Listening> awaited;
  int failures = 0;
  while (failures < kMostFailures + kAwaited * group_->getSize()) {
    try {
      if (!listen(awaited)) return;
      failures = 0;
    } catch (const std::exception&) {  // a rank that asked is gone, and others may ask
      ++failures;
      std::this_thread::sleep_for(kAfterFailure);
    }
  }
  close_connections(group_);  // others should not wait for answers
}

// Receives one question. Returns false when the server stops.
bool QuestionServer::listen(std::deque<Listening>& awaited) {
  while (static_cast<int>(awaited.size()) < kAwaited) {
    std::vector<at::Tensor> into{at::empty({HeardQuestion::kHeader + kind_.num_numbers}, at::kLong)};
    awaited.push_back({into[0], backend_->recvAnysource(into, kind_.tag_of_questions())});
  }
  const Listening next = awaited.front();
  awaited.pop_front();
  if (!receive(next.work)) return !is_stopping();
  int64_t num_rest = 0;
  HeardQuestion heard = HeardQuestion::unpack(next.numbers, num_rest);
  return hear(std::move(heard), num_rest);
}

bool QuestionServer::hear(HeardQuestion heard, int64_t num_rest) {
  if (heard.tag == HeardQuestion::kTold) {
    note(heard.rank, static_cast<Told>(heard.what[0]));
    return true;
  }
  if (num_rest > 0) {
    std::vector<at::Tensor> rest{at::empty({num_rest}, at::kLong)};
    if (!receive(backend_->recv(rest, heard.rank, kind_.tag_of_rest(heard.tag)))) return !is_stopping();
    const auto* numbers = rest[0].const_data_ptr<int64_t>();
    heard.rest.assign(numbers, numbers + num_rest);
  }
  hear_(std::move(heard));
  return true;
}

// Whether it has arrived.
bool QuestionServer::receive(const Work& work) {
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

bool QuestionServer::is_stopping() const {
  const std::lock_guard lock(mutex_);
  return stopping_;
}

void QuestionServer::note(int rank, Told told) {
  std::vector<Answer> freed;  // without the lock
  const std::lock_guard lock(mutex_);
  Asker& asker = askers_.at(rank);
  if (told == Told::is_through) freed.swap(asker.answers);
  asker.told = std::max(asker.told, told);
}

Told QuestionServer::told_by(int rank) const {
  const std::lock_guard lock(mutex_);
  return askers_.at(rank).told;
}

at::Tensor QuestionServer::last_answer(int rank, int tag) const {
  const std::lock_guard lock(mutex_);
  const auto& answers = askers_.at(rank).answers;
  return tag < static_cast<int>(answers.size()) ? answers[tag].message : at::Tensor();
}

void QuestionServer::answer(int rank, int tag, at::Tensor message) {
  std::vector<at::Tensor> messages{std::move(message)};
  const std::lock_guard lock(mutex_);
  auto& answers = askers_.at(rank).answers;
  if (tag >= static_cast<int>(answers.size())) answers.resize(tag + 1);
  try {
    answers[tag] = {backend_->send(messages, rank, kind_.tag_of_answer(tag)), messages[0]};
  } catch (const std::exception&) {  // the rank is gone, and waits for nothing
  }
}

}  // namespace zx
