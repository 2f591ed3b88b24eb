// Steps in columns, the cheap form of most calls. A server may leave them out: then it declares no `step_columns`.
#pragma once

#include <numeric>

#include "errors.h"

// False: the transition has more than columns hold.
inline bool add_row(std::uint64_t call_id, const pb::Transition& transition, pb::TransitionColumns* to) {
  const auto& seen = transition.observation();
  if (seen.valid_actions_size() || seen.has_expert_action()) return false;
  if (transition.end_reason()) {
    to->add_ended_rows(static_cast<unsigned>(to->call_ids_size()));
    to->add_end_reasons(transition.end_reason());
    to->add_end_successes(transition.success() ? 2 : 1);
  }
  to->add_call_ids(call_id);
  to->add_texts(seen.parts(0).text());
  to->add_state_keys(seen.state_key());
  to->add_rewards(transition.reward());
  to->add_outcome_counts(static_cast<unsigned>(transition.outcomes_size()));
  for (const auto& outcome : transition.outcomes()) {
    to->add_outcome_flags(outcome.executed() + 2u * outcome.valid() + 4u * outcome.effective());
    to->add_outcome_rewards(outcome.reward());
  }
  return true;
}

// Plays the rows by `step`, which takes a StepRequest and a StepResponse and throws errors. Throws before it plays any.
template <class Step>
void step_rows(const pb::StepColumns& rows, pb::StreamResponse* response, Step step) {
  const int count = rows.call_ids_size(), counted = rows.action_counts_size();
  const auto counts = std::accumulate(rows.action_counts().begin(), rows.action_counts().end(), std::uint64_t{0});
  if (rows.session_ids_size() != count || rows.epochs_size() != count || rows.step_indices_size() != count ||
      (counted && counted != count) || (counted ? counts : count) != static_cast<std::uint64_t>(rows.actions_size()))
    throw bad_argument("steps", "columns of unequal lengths");
  pb::StepRequest request;
  pb::StepResponse reply;
  for (int row = 0, next = 0; row < count; ++row) {
    request.set_session_id(rows.session_ids(row));
    request.set_epoch(rows.epochs(row));
    request.set_step_index(rows.step_indices(row));
    request.clear_actions();
    for (unsigned n = counted ? rows.action_counts(row) : 1; n > 0; --n)
      request.add_actions()->set_text(rows.actions(next++));
    reply.Clear();
    const auto status = attempt([&] { step(request, &reply); });
    if (status.ok() && add_row(rows.call_ids(row), reply.transition(), response->mutable_transitions())) continue;
    auto* apart = response->add_replies();
    apart->set_call_id(rows.call_ids(row));
    if (status.ok()) *apart->mutable_step() = reply;
    else apart->mutable_error()->ParseFromString(status.error_details());
  }
}
