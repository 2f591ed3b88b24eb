// The calls of the contract.
//
// gRPC's synchronous service: each unary call and each Stream runs on a thread of gRPC's pool. A handler runs to its
// end though the caller has given up, as the contract wants, and a session's mutex makes its calls run one at a time.
#pragma once

#include <google/protobuf/text_format.h>

#include <atomic>
#include <unordered_map>

#include "columns.h"
#include "session.h"
#include "turn.h"
#include "version.h"

inline constexpr const char* kServer = R"(
  protocol_version: "1.0" server_name: "key_door_server" server_version: "1.0.0"
  capabilities { stream: true step_columns: true }
  limits { max_message_bytes: 16777216 max_sessions: 100000 max_group: 1024 max_step_actions: 64
           default_lease_seconds: 300 max_lease_seconds: 3600 }
)";

#define EACH_CALL(DO)                                                                                     \
  DO(Open, open) DO(Reset, reset) DO(Step, step) DO(Render, render) DO(Fork, fork) DO(Snapshot, snapshot) \
  DO(Restore, restore) DO(Renew, renew) DO(Close, close)

class Service final : public pb::EnvironmentService::Service {
 public:
  pb::DescribeResponse about;  // does not change once the server runs
  std::atomic<bool> draining = false;

  Service() {
    google::protobuf::TextFormat::ParseFromString(kServer, &about);
    google::protobuf::TextFormat::ParseFromString(World::kSpec, about.add_environments());
    about.set_instance_id(std::to_string(draw()));
  }

  grpc::Status Describe(grpc::ServerContext*, const pb::DescribeRequest* request,
                        pb::DescribeResponse* reply) override {
    return attempt([&] {
      if (!request->environment_id().empty()) check_environment(request->environment_id());
      std::lock_guard lock(mutex_);
      *reply = about;
      reply->set_draining(draining);
      reply->set_live_sessions(static_cast<unsigned>(sessions_.size()));
    });
  }

#define UNARY(Rpc, rpc)                                                                                        \
  grpc::Status Rpc(grpc::ServerContext*, const pb::Rpc##Request* request, pb::Rpc##Response* reply) override { \
    return attempt([&] { rpc(*request, reply); });                                                             \
  }
  EACH_CALL(UNARY)

  // A step takes a microsecond, so a message is worked on where it was read, in its order, and answered in one message.
  // Where steps take longer, spread a message's sessions over a pool of threads; Write then needs a mutex.
  grpc::Status Stream(grpc::ServerContext*,
                      grpc::ServerReaderWriter<pb::StreamResponse, pb::StreamRequest>* stream) override {
    for (pb::StreamRequest request; stream->Read(&request);) {
      const auto received = Clock::now();
      pb::StreamResponse response;
      std::size_t bytes = 0;
      for (const auto& call : request.calls()) {
        auto* reply = response.add_replies();
        reply->set_call_id(call.call_id());
        auto status = attempt([&] { work(call, reply); });
        if (call.timeout_ms() && Clock::now() - received > std::chrono::milliseconds(call.timeout_ms()))
          status = failure(grpc::DEADLINE_EXCEEDED, "DEADLINE", "done, but late: ask again", {{"advice", "retry"}});
        if (!status.ok()) reply->mutable_error()->ParseFromString(status.error_details());
        bytes += reply->ByteSizeLong();
        if (bytes < 1 << 20) continue;  // else keep the message below max_message_bytes
        stream->Write(response);
        response.Clear();
        bytes = 0;
      }
      const auto status = attempt([&] {
        step_rows(request.steps(), &response, [&](const auto& row, auto* reply) { step(row, reply); });
      });
      if (response.replies_size() || response.has_transitions()) stream->Write(response);
      if (!status.ok()) return status;
    }
    return grpc::Status::OK;
  }

  // Forgets what has run out. Returns whether any session is left.
  bool reap() {
    std::lock_guard lock(mutex_);
    std::erase_if(sessions_, [](const auto& entry) {
      if (entry.second.use_count() > 1) entry.second->expires = from_now(entry.second->state.lease);  // it is worked on
      return entry.second->expires < Clock::now();
    });
    std::erase_if(keys_, [](const auto& entry) {
      Key& key = *entry.second;
      for (const auto& session : key.sessions)
        if (const auto alive = session.lock()) key.expires = from_now(alive->state.lease);
      return entry.second.use_count() == 1 && key.expires < Clock::now();
    });
    return !sessions_.empty();
  }

 private:
  const pb::EnvironmentSpec& spec() const { return about.environments(0); }

  void check_environment(const std::string& id) const {
    if (id != spec().id())
      throw failure(grpc::NOT_FOUND, "UNKNOWN_ENVIRONMENT", "there is only " + spec().id(), {{"nearest", spec().id()}});
  }

  template <class Request>
  static void check_start(const Request& request) {
    if (!request.options().fields().empty())
      throw bad_argument(request.options().fields().begin()->first.substr(0, 100), "there are no options");
    check_want(request.want());
  }
  static void check_want(const pb::Want& want) {
    if (want.score() || want.image()) throw unsupported(want.score() ? "score" : "image");
  }

  std::shared_ptr<Session> find(const std::string& id) {
    std::lock_guard lock(mutex_);
    const auto found = sessions_.find(id);
    if (found == sessions_.end())
      throw failure(grpc::NOT_FOUND, "UNKNOWN_SESSION", "closed, or its lease ran out", {{"advice", "reopen"}});
    found->second->expires = from_now(found->second->state.lease);
    return found->second;
  }

  // Creates sessions, once per key. `make` returns the state of one, given its place among them and its member number.
  template <class Request, class Response, class Make>
  void create(const Request& request, Response* reply, Make make) {
    if (request.key().size() > 128) throw bad_argument("key", "at most 128 bytes");
    if (request.count() > about.limits().max_group()) throw bad_argument("count", "more than max_group");
    auto key = std::make_shared<Key>();
    if (!request.key().empty()) {
      std::lock_guard lock(mutex_);
      key = keys_.try_emplace(request.key(), key).first->second;
    }
    std::lock_guard one_at_a_time(key->mutex);
    const auto* created = std::any_cast<Memo<Request, Response>>(&key->created);
    if (created && created->holds(request)) return reply->CopyFrom(created->reply);
    if (key->created.has_value())
      throw failure(grpc::FAILED_PRECONDITION, "KEY_REUSED", "this key was used for another request: take a new one");
    std::vector<std::shared_ptr<Session>> made;
    for (unsigned i = 0; i < std::max(request.count(), 1u); ++i) {
      made.push_back(std::make_shared<Session>(make(i, request.first_member() + i)));
      made[i]->state.place.set_session_id(std::to_string(draw()) + "-" + std::to_string(draw()));
      made[i]->state.place.set_epoch(1);
      made[i]->expires = from_now(made[i]->state.lease);
      show(made[i]->state, reply->add_sessions());
    }
    std::lock_guard lock(mutex_);
    if (draining) throw failure(grpc::UNAVAILABLE, "DRAINING", "the server is going away", {{"advice", "reopen"}});
    if (sessions_.size() + made.size() > about.limits().max_sessions()) {
      google::rpc::RetryInfo later;
      later.mutable_retry_delay()->set_seconds(1);
      throw failure(grpc::RESOURCE_EXHAUSTED, "OVERLOADED", "no room for more sessions",
                    {{"advice", "retry"}, {"limit", "max_sessions"}}, &later);
    }
    for (const auto& session : made) sessions_[session->state.place.session_id()] = session;
    key->sessions.assign(made.begin(), made.end());
    key->created = Memo<Request, Response>{request, *reply};
  }

  void open(const pb::OpenRequest& request, pb::OpenResponse* reply) {
    check_environment(request.environment_id());
    if (!fits(spec().version(), request.version()))
      throw failure(grpc::NOT_FOUND, "UNKNOWN_VERSION", "no version fits", {{"available", spec().version()}});
    check_start(request);
    const auto& bounds = about.limits();
    const double asked = request.lease_seconds();  // NaN is not above 0
    reply->set_lease_seconds(asked > 0 ? std::min(asked, bounds.max_lease_seconds()) : bounds.default_lease_seconds());
    *reply->mutable_limits() = spec().limits();
    override(reply->mutable_limits(), request.limits());
    reply->set_environment_version(spec().version());
    reply->set_instructions(spec().instructions());
    reply->set_instance_id(about.instance_id());
    const auto seed = request.has_seed() ? request.seed() : draw();
    create(request, reply, [&](unsigned, unsigned member) {
      State state;
      state.place.set_member(member);
      state.want = request.want();
      state.limits = reply->limits();
      state.lease = reply->lease_seconds();
      state.begin(request, seed);
      return state;
    });
  }

  void fork(const pb::ForkRequest& request, pb::ForkResponse* reply) {
    const bool reseed = request.randomness() == pb::FORK_RANDOMNESS_RESEED;
    const auto& seeds = request.dynamics_seeds();
    if (!pb::ForkRandomness_IsValid(request.randomness())) throw bad_argument("randomness", "KEEP or RESEED");
    if (!seeds.empty() && (!reseed || seeds.size() != static_cast<int>(std::max(request.count(), 1u))))
      throw bad_argument("dynamics_seeds", "give one per copy with RESEED, or none");
    create(request, reply, [&](unsigned i, unsigned member) {
      const auto original = find(request.session_id());
      std::lock_guard lock(original->mutex);
      if (!original->stands_at(request)) throw original->refuse("OUT_OF_ORDER", "the session is at another place");
      State state = original->state;
      auto& place = state.place;
      place.set_member(member);
      if (reseed) {
        const auto derived = mix(mix(place.dynamics_seed() + state.episode.turns) + member);
        place.set_dynamics_seed(seeds.empty() ? derived : seeds[static_cast<int>(i)]);
        state.episode.world.reseed(place.dynamics_seed());
      }
      return state;
    });
  }

  void reset(const pb::ResetRequest& request, pb::ResetResponse* reply) {
    const auto session = find(request.session_id());
    std::lock_guard lock(session->mutex);
    State& state = session->state;
    if (session->reset.holds(request)) return reply->CopyFrom(session->reset.reply);
    if (request.epoch() != state.place.epoch()) throw session->refuse("OUT_OF_ORDER", "not the current epoch");
    check_start(request);
    state.begin(request, request.has_seed() ? request.seed() : draw());
    state.place.set_epoch(request.epoch() + 1);
    if (request.has_want()) state.want = request.want();
    override(&state.limits, request.limits());
    show(state, reply->mutable_session());
    reply->set_instructions(spec().instructions());
    *reply->mutable_limits() = state.limits;
    session->stepped.request.reset();
    session->reset = {request, *reply};
  }

  void step(const pb::StepRequest& request, pb::StepResponse* reply) {
    const auto session = find(request.session_id());
    std::lock_guard lock(session->mutex);
    if (!session->stands_at(request)) {
      pb::StepRequest again = request;
      again.clear_want();  // whatever a repetition wants, its reply is the first one
      if (session->stepped.holds(again)) return reply->CopyFrom(session->stepped.reply);
      throw session->refuse("OUT_OF_ORDER", "the session is at another place");
    }
    if (session->state.episode.over) throw session->refuse("EPISODE_OVER", "the episode is over: Reset");
    if (request.actions_size() > static_cast<int>(about.limits().max_step_actions()))
      throw bad_argument("actions", "more than max_step_actions");
    for (const auto& action : request.actions())
      if (!action.has_text()) throw bad_argument("actions", "this environment takes text alone");
    check_want(request.want());
    State& state = session->state;
    Episode episode = state.episode;  // a copy: if anything is thrown, nothing has changed
    play(spec(), request, state.limits, &episode, reply->mutable_transition());
    const auto& want = request.has_want() ? request.want() : state.want;
    observe(spec(), episode, want, reply->mutable_transition()->mutable_observation());
    reply->set_next_step_index(episode.turns);
    state.episode = episode;
    session->reset.request.reset();
    session->stepped.request = request;
    session->stepped.request->clear_want();
    session->stepped.reply = *reply;
  }

  void render(const pb::RenderRequest& request, pb::RenderResponse* reply) {
    const auto session = find(request.session_id());
    if (!request.mode().empty() && request.mode() != "text") throw bad_argument("mode", "there is only text");
    std::lock_guard lock(session->mutex);
    reply->set_mime("text/plain; charset=utf-8");
    reply->set_data(session->state.episode.world.observation());
  }

  void restore(const pb::RestoreRequest&, pb::RestoreResponse*) { throw unsupported("snapshot"); }
  void snapshot(const pb::SnapshotRequest& request, pb::SnapshotResponse*) {
    find(request.session_id());
    throw unsupported("snapshot");
  }

  void renew(const pb::RenewRequest& request, pb::RenewResponse* reply) {
    for (const auto& id : request.session_ids())
      if (!attempt([&] { find(id); }).ok()) reply->add_missing(id);
  }

  void close(const pb::CloseRequest& request, pb::CloseResponse*) {
    std::lock_guard lock(mutex_);
    for (const auto& id : request.session_ids()) sessions_.erase(id);
  }

  void work(const pb::Call& call, pb::Reply* reply) {
    switch (call.request_case()) {
#define CASE(Rpc, rpc) \
  case pb::Call::k##Rpc: return rpc(call.rpc(), reply->mutable_##rpc());
      EACH_CALL(CASE)
      default: throw bad_argument("request", "a call needs one");
    }
  }

  void show(const State& state, pb::Session* to) const {
    *to = state.place;
    to->set_step_index(state.episode.turns);
    observe(spec(), state.episode, state.want, to->mutable_observation());
  }

  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<Session>> sessions_;
  std::unordered_map<std::string, std::shared_ptr<Key>> keys_;
};
