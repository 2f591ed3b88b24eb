// One turn of an episode: sub-actions within limits, and what the agent sees after them.
#pragma once

#include <strings.h>

#include "session.h"

// -1: there is none. Case and the space around a name do not matter.
inline int find_action(const pb::EnvironmentSpec& spec, std::string name) {
  name.erase(0, name.find_first_not_of(" \t\r\n"));
  name.erase(name.find_last_not_of(" \t\r\n") + 1);
  const auto& names = spec.action_space().names();
  for (int i = 0; i < names.size(); ++i)
    if (strcasecmp(names[i].c_str(), name.c_str()) == 0) return i;
  return -1;
}

inline void play(const pb::EnvironmentSpec& spec, const pb::StepRequest& request, const pb::Limits& limits,
                 Episode* episode, pb::Transition* transition) {
  const auto spent = [](unsigned used, unsigned limit) { return limit && used >= limit; };
  auto end = pb::END_REASON_UNSPECIFIED;
  unsigned executed = 0;
  for (const auto& action : request.actions()) {
    auto* outcome = transition->add_outcomes();
    const int number = find_action(spec, action.text());
    const bool beyond = end || spent(executed, limits.max_actions_per_turn());
    outcome->set_valid(beyond || number >= 0);
    if (beyond || number < 0) continue;
    const auto result = episode->world.step(number);
    outcome->set_executed(true);
    outcome->set_effective(result.effective);
    outcome->set_reward(result.reward);
    transition->set_reward(transition->reward() + result.reward);
    ++executed, ++episode->actions;
    if (result.solved) end = pb::END_REASON_TERMINAL;
    else if (spent(episode->actions, limits.max_actions())) end = pb::END_REASON_MAX_ACTIONS;
  }
  ++episode->turns;
  if (!end && spent(episode->turns, limits.max_turns())) end = pb::END_REASON_MAX_TURNS;
  episode->over = end;
  transition->set_end_reason(end);
  transition->set_terminated(end == pb::END_REASON_TERMINAL);
  transition->set_truncated(end && !transition->terminated());
  if (end) transition->set_success(transition->terminated());
}

inline void observe(const pb::EnvironmentSpec& spec, const Episode& episode, const pb::Want& want,
                    pb::Observation* to) {
  const auto& names = spec.action_space().names();
  to->add_parts()->set_text(episode.world.observation());
  if (want.state_key()) to->set_state_key(episode.world.state_key());
  if (episode.over) return;
  if (want.expert_action()) to->mutable_expert_action()->set_text(names[episode.world.expert_action()]);
  for (int i = 0; want.valid_actions() && i < names.size(); ++i)
    if (episode.world.allows(i)) to->add_valid_actions()->set_text(names[i]);
}
