// What the server remembers: sessions, and the replies that it owes again when a call is repeated.
#pragma once

#include <google/protobuf/util/message_differencer.h>

#include <any>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <vector>

#include "errors.h"
#include "key_door.h"

using World = KeyDoor;  // your own environment goes here
using Clock = std::chrono::steady_clock;

inline std::uint64_t draw() {
  thread_local std::random_device device;
  return static_cast<std::uint64_t>(device()) << 32 | device();
}

inline Clock::time_point from_now(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// Their fields have the same numbers, and of those of `given` only those that are there are written.
inline void override(pb::Limits* limits, const pb::LimitOverrides& given) {
  limits->MergeFromString(given.SerializeAsString());
}

struct Episode {
  World world;
  unsigned turns = 0, actions = 0;
  bool over = false;
};

struct State {  // plain data: to fork is to copy it
  pb::Session place;  // all but step index and observation
  pb::Want want;
  pb::Limits limits;
  double lease = 0;  // seconds
  Episode episode{World(0, 0)};

  template <class Request>
  void begin(const Request& request, std::uint64_t seed) {
    place.set_seed(seed);
    place.set_dynamics_seed(request.has_dynamics_seed() ? request.dynamics_seed() : mix(mix(seed) + place.member()));
    episode = {World(seed, place.dynamics_seed())};
  }
};

template <class Request, class Response>
struct Memo {  // the reply to a request, for when it is asked again
  std::optional<Request> request;
  Response reply;

  bool holds(const Request& asked) const {
    return request && google::protobuf::util::MessageDifferencer::Equals(*request, asked);
  }
};

struct Session {
  State state;
  Memo<pb::StepRequest, pb::StepResponse> stepped{};
  Memo<pb::ResetRequest, pb::ResetResponse> reset{};
  std::mutex mutex{};           // held by the call that works on the session
  Clock::time_point expires{};  // guarded by the service's mutex

  template <class Request>
  bool stands_at(const Request& request) const {
    return request.epoch() == state.place.epoch() && request.step_index() == state.episode.turns;
  }
  grpc::Status refuse(const std::string& reason, const std::string& message) const {
    return failure(grpc::FAILED_PRECONDITION, reason, message,
                   {{"expected_epoch", std::to_string(state.place.epoch())},
                    {"expected_step_index", std::to_string(state.episode.turns)}});
  }
};

struct Key {
  std::mutex mutex;  // held by the call that creates the sessions
  std::any created;  // the Memo of the call that did
  std::vector<std::weak_ptr<Session>> sessions;  // guarded by the service's mutex, as is the next
  Clock::time_point expires;
};
