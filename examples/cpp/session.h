// A session: its episode with limits, and its observations. It is plain data, so that calls can work on a copy.
#pragma once
#include <google/protobuf/text_format.h>
#include <strings.h>

#include "about.h"  // CMake generates it from about.textproto
#include "errors.h"
#include "key_door.h"
#include "starpod/v1/environment.grpc.pb.h"

namespace pb = starpod::v1;

inline const auto about = [] {
  pb::DescribeResponse parsed;
  if (!google::protobuf::TextFormat::ParseFromString(kAbout, &parsed)) std::abort();
  return parsed;
}();
inline const auto& spec = about.environments(0);
inline const auto& names = spec.action_space().names();

inline std::string identity(const Message& request) { return request.GetTypeName() + request.SerializeAsString(); }

inline int find_action(std::string text) {  // -1: unknown. Case and surrounding spaces do not matter
  text.erase(0, text.find_first_not_of(" \t\r\n"));
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  const auto same = [&](const std::string& name) { return strcasecmp(name.c_str(), text.c_str()) == 0; };
  const auto found = std::find_if(names.begin(), names.end(), same);
  return found == names.end() ? -1 : static_cast<int>(found - names.begin());
}

struct Memo {  // a request, and the reply that each repetition of it gets
  std::string request, reply;
  double expires = 0;
  void repeat(const Message& asked, Message* to, const grpc::Status& otherwise) const {
    if (identity(asked) != request) throw otherwise;
    to->ParseFromString(reply);
  }
};

struct Session {
  pb::Session place;  // the session's message without its observation; step_index counts the turns
  pb::Want want;
  pb::Limits limits = spec.limits();
  double lease = 0, expires = 0;  // seconds
  std::string key;                // of the call that created it
  Memo last;                      // Step or Reset
  unsigned actions = 0;
  bool over = false;
  KeyDoor world{0, 0};

  template <class Request>  // of Open or Reset
  void begin(const Request& request, std::uint64_t seed) {
    for (const auto& [name, value] : request.options().fields()) throw bad_argument(name, "there are no options");
    if (request.has_want()) want = request.want();
    limits.MergeFromString(request.limits().SerializeAsString());  // same field numbers; only fields that are set
    place.set_step_index(0);
    place.set_seed(seed);
    place.set_dynamics_seed(request.has_dynamics_seed() ? request.dynamics_seed() : mix(mix(seed) + place.member()));
    world = {seed, place.dynamics_seed()};
    actions = over = 0;
  }
  void play(const pb::StepRequest& request, pb::Transition* turn) {
    auto end = pb::END_REASON_UNSPECIFIED;
    unsigned executed = 0;
    for (const auto& action : request.actions()) {
      auto* outcome = turn->add_outcomes();
      const bool late = end || (executed && executed == limits.max_actions_per_turn());
      const int number = late ? -1 : find_action(action.text());
      outcome->set_valid(late || number >= 0);
      if (number < 0) continue;
      const auto [effective, solved, reward] = world.step(number);
      outcome->set_executed(true);
      outcome->set_effective(effective);
      outcome->set_reward(reward);
      turn->set_reward(turn->reward() + reward);
      ++executed, ++actions;
      end = solved ? pb::END_REASON_TERMINAL : actions == limits.max_actions() ? pb::END_REASON_MAX_ACTIONS : end;
    }
    place.set_step_index(place.step_index() + 1);
    if (!end && place.step_index() == limits.max_turns()) end = pb::END_REASON_MAX_TURNS;
    over = end;
    turn->set_end_reason(end);
    turn->set_terminated(end == pb::END_REASON_TERMINAL);
    turn->set_truncated(over && !turn->terminated());
    if (over) turn->set_success(turn->terminated());
  }
  void observe(const pb::Want& wanted, pb::Observation* to) const {
    if (wanted.score() || wanted.image()) throw unsupported(wanted.score() ? "score" : "image");
    to->add_parts()->set_text(world.observation());
    if (wanted.state_key()) to->set_state_key(world.state_key());
    if (wanted.expert_action() && !over) to->mutable_expert_action()->set_text(names[world.expert_action()]);
    for (int i = 0; wanted.valid_actions() && !over && i < names.size(); ++i)
      if (world.allows(i)) to->add_valid_actions()->set_text(names[i]);
  }
  void show(pb::Session* to) const { observe(want, (*to = place).mutable_observation()); }

  bool at(const pb::StepRequest& request) const {
    return request.epoch() == place.epoch() && request.step_index() == place.step_index();
  }
  grpc::Status misplaced(const std::string& reason) const {
    return failure(grpc::FAILED_PRECONDITION, reason, "the session is at another place, or over",
                   {{"expected_epoch", std::to_string(place.epoch())},
                    {"expected_step_index", std::to_string(place.step_index())}});
  }
};
