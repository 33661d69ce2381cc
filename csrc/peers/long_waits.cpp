#include "peers/long_waits.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "peers/tags.h"

namespace zx {
namespace {

constexpr std::chrono::milliseconds kLongWait{1000};
constexpr std::chrono::milliseconds kAsk{3000};  // for where a rank stands

}  // namespace

thread_local const Doing* Doing::current_ = nullptr;
thread_local LongWait* LongWait::current_ = nullptr;

std::string WaitingFor::line(const std::string& doing, std::chrono::seconds waited) const {
  std::ostringstream text;
  text << "zerox: rank " << rank << " has waited " << waited.count() << " s";
  if (!doing.empty()) text << " in " << doing;
  text << " for " << whom;
  if (!seen.empty()) text << ", last " << seen;
  text << "; it gives up after " << std::chrono::duration<double>(timeout).count()
       << " s (init_process_group(timeout=...) sets this)";
  return text.str();
}

void say(const std::string& line) {
  std::fputs((line + "\n").c_str(), stderr);
  std::fflush(stderr);
}

bool AwaitedMessage::end_if_lost() {
  if (group_ == nullptr || is_lost_ || is_connected()) return false;
  is_lost_ = true;
  work_->abort();
  return true;
}

bool AwaitedMessage::is_connected() const {
  std::vector<at::Tensor> message{at::zeros({1}, at::kByte)};
  try {
    group_->send(message, peer_, kTagsEnd);
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

LongWait::LongWait(std::chrono::milliseconds say_after, std::function<WaitingFor()> describe)
    : say_after_(say_after), describe_(std::move(describe)) {
  current_ = this;
  LongWaits::all().add(*this);
}

LongWait::~LongWait() {
  LongWaits::all().remove(*this);
  current_ = outer_;
}

bool LongWait::await(c10d::ProcessGroup& group, c10d::Work& work, int peer, bool is_answer) {
  auto& mutex = LongWaits::all().mutex_;
  {
    const std::lock_guard lock(mutex);
    message_ = {group, work, peer, is_answer};
  }
  const bool is_through = work.wait();
  if (!is_through) check();
  const std::lock_guard lock(mutex);
  TORCH_CHECK(is_through || !message_.is_lost(), "Connection closed by peer in the middle of a message");
  message_ = {};
  return is_through;
}

LongWaits& LongWaits::all() {
  static auto* waits = new LongWaits;
  return *waits;
}

void LongWaits::add(LongWait& wait) {
  const std::lock_guard lock(mutex_);
  if (!has_thread_) std::thread([this] { watch(); }).detach();
  has_thread_ = true;
  waits_.insert(&wait);
}

void LongWaits::remove(LongWait& wait) {
  const std::lock_guard lock(mutex_);
  waits_.erase(&wait);
}

void LongWaits::watch() {
  while (true) {
    std::this_thread::sleep_for(kLongWait);
    std::vector<std::string> lines;
    {
      const std::lock_guard lock(mutex_);
      for (LongWait* wait : waits_) {
        const auto waited = wait->waited();
        if (waited < kLongWait) continue;
        if (wait->message_.end_if_lost()) continue;
        if (wait->is_said_ || wait->say_after_.count() == 0 || waited < wait->say_after_) continue;
        const WaitingFor waiting = wait->describe_();
        if (has_said(waiting.rank)) continue;
        wait->is_said_ = true;
        const std::string doing = wait->doing_ == nullptr ? "" : wait->doing_->text();
        lines.push_back(waiting.line(doing, std::chrono::duration_cast<std::chrono::seconds>(waited)));
      }
    }
    for (const std::string& line : lines) say(line);  // without the lock: whoever reads stderr may be slow
    end_vain_waits();
  }
}

// Under the lock: whether a wait of this rank's that lasts is said already. What else it waits for then has the same
// reason as a rule: its workers and its caller wait for one late rank.
bool LongWaits::has_said(int rank) const {
  return std::any_of(waits_.begin(), waits_.end(),
                     [rank](const LongWait* wait) { return wait->is_said_ && wait->describe_().rank == rank; });
}

// See Note [Two waits for each other]. Workers' waits are not those of a call: this rank may still come to the barrier.
void LongWaits::end_vain_waits() {
  struct Question {
    LongWait* wait;
    LongWait::Clock::time_point start;
    std::string call;
    WaitingFor waiting;
  };
  std::vector<Question> questions;
  {
    const std::lock_guard lock(mutex_);
    const auto now = LongWait::Clock::now();
    for (LongWait* wait : waits_) {
      if (wait->doing_ == nullptr || wait->doing_->per_batch() || wait->is_vain_ || now - wait->asked_ < kAsk) continue;
      wait->asked_ = now;
      questions.push_back({wait, wait->start_, wait->doing_->text(), wait->describe_()});
    }
  }
  for (const auto& [wait, start, call, waiting] : questions) {
    const std::string where = waiting.stands_outside ? waiting.stands_outside() : "";  // takes its time
    const std::lock_guard lock(mutex_);
    if (where.empty() || !waits_.contains(wait) || wait->start_ != start) continue;
    wait->why_ = c10::str(waiting.whom, " is in ", where, ", and waits there for rank ", waiting.rank, ", which is in ",
                          call, ": call ", call, " on all ranks");
    wait->is_vain_ = true;
    wait->message_.end_if_vain();
  }
}

}  // namespace zx
