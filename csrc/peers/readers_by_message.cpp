#include "peers/readers_by_message.h"

#include <ATen/ops/zeros.h>

#include <exception>
#include <utility>

#include "peers/tags.h"

namespace zx {
namespace {

constexpr std::chrono::seconds kLookAgain{1};

}  // namespace

ReadersByMessage::ReadersByMessage(const Group& group, std::shared_ptr<StateServer> server,
                                   std::shared_ptr<StateQuestions> questions)
    : group_(group),
      backend_(group->getBackend(c10::DeviceType::CPU)),
      server_(std::move(server)),
      questions_(std::move(questions)),
      seen_(group->getSize()) {}

void ReadersByMessage::count_reader(int more) {
  if ((num_readers_ += more) == 0) tell_all(Told::asks_no_more);
}

void ReadersByMessage::tell_all(Told what) {
  for (int rank = 0; rank < group_->getSize(); ++rank) {
    if (rank != group_->getRank()) questions_->tell(rank, what);
  }
}

bool ReadersByMessage::may_read(int rank) const {
  return server_->told_by(rank) < Told::asks_no_more && is_connected(rank);
}

// A message that nothing receives can't be begun where the connection is gone.
bool ReadersByMessage::is_connected(int rank) const {
  const std::lock_guard lock(mutex_);
  Seen& seen = seen_.at(rank);
  const auto now = Clock::now();
  if (seen.is_gone || now - seen.looked < kLookAgain) return !seen.is_gone;
  seen.looked = now;
  try {
    std::vector<at::Tensor> message{at::zeros({1}, at::kByte)};
    backend_->send(message, rank, kTagsEnd);
  } catch (const std::exception&) {
    seen.is_gone = true;
  }
  return !seen.is_gone;
}

}  // namespace zx
