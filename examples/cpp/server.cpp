// Serves one environment over proto/starpod/v1/environment.proto, as docs/protocol.md says.
//
// gRPC's synchronous service: each unary call and each Stream runs on a thread of gRPC's pool. A handler runs to its
// end though the caller has given up, as the contract wants, and a session's mutex makes its calls run one at a time.
#include <google/protobuf/text_format.h>
#include <google/protobuf/util/message_differencer.h>
#include <google/rpc/error_details.pb.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>

#include <csignal>
#include <iostream>
#include <map>
#include <random>
#include <regex>

#include "key_door.h"
#include "starpod/v1/environment.grpc.pb.h"

namespace pb = starpod::v1;
using World = KeyDoor;  // your own environment goes here
using Clock = std::chrono::steady_clock;
using google::protobuf::Message, google::protobuf::TextFormat, google::protobuf::util::MessageDifferencer;

constexpr const char* kServer = R"(
  protocol_version: "1.0" server_name: "key_door_server" server_version: "1.0.0" capabilities { stream: true }
  limits { max_message_bytes: 16777216 max_sessions: 100000 max_group: 1024 max_step_actions: 64
           default_lease_seconds: 300 max_lease_seconds: 3600 }
)";

// ---- Errors are thrown as the status that a unary call ends with. Its details are what a Reply on a Stream carries.

grpc::Status failure(grpc::StatusCode code, const std::string& reason, const std::string& message,
                     std::map<std::string, std::string> metadata = {}, const Message* more = nullptr) {
  google::rpc::ErrorInfo info;
  info.set_domain("starpod.v1");
  info.set_reason(reason);
  metadata.try_emplace("advice", "give_up");
  info.mutable_metadata()->insert(metadata.begin(), metadata.end());
  google::rpc::Status status;
  status.set_code(code);
  status.set_message(message);
  status.add_details()->PackFrom(info);
  if (more) status.add_details()->PackFrom(*more);
  return {code, message, status.SerializeAsString()};
}

grpc::Status bad_argument(const std::string& field, const std::string& mend) {
  google::rpc::BadRequest request;
  auto* violation = request.add_field_violations();
  violation->set_field(field);
  violation->set_description(mend);
  return failure(grpc::INVALID_ARGUMENT, "BAD_ARGUMENT", field + ": " + mend, {}, &request);
}

grpc::Status unsupported(const std::string& what) {
  return failure(grpc::UNIMPLEMENTED, "UNSUPPORTED", "this environment has no " + what, {{"capability", what}});
}

template <class Work>
grpc::Status attempt(Work work) {
  try {
    work();
    return grpc::Status::OK;
  } catch (const grpc::Status& status) {
    return status;
  } catch (const std::exception& error) {
    return failure(grpc::INTERNAL, "SERVER_BUG", error.what());
  }
}

// Whether a version fits all comparators of a pin. What is left out of a version is 0.
bool fits(const std::string& version, const std::string& pin) {
  static const std::regex form(R"( *(==|!=|>=|<=|>|<)? *(\d{1,9})(?:\.(\d{1,9}))?(?:\.(\d{1,9}))? *)");
  const auto parts = [](const std::string& text) {
    std::smatch part;
    if (!std::regex_match(text, part, form)) throw bad_argument("version", "write comparators, as in '>=1.2.0,<2.0.0'");
    const auto number = [&](int i) { return std::atoi(part.str(i).c_str()); };
    return std::pair{part.str(1), std::array{number(2), number(3), number(4)}};
  };
  bool all = true;
  std::istringstream comparators(pin);
  for (std::string text; std::getline(comparators, text, ',');) {
    const auto [sign, wanted] = parts(text);
    const auto order = parts(version).second <=> wanted;
    all &= sign == "!=" ? order != 0 : sign == ">=" ? order >= 0 : sign == "<=" ? order <= 0
           : sign == ">" ? order > 0 : sign == "<" ? order < 0 : order == 0;
  }
  return all;
}

std::uint64_t draw() {
  thread_local std::random_device device;
  return static_cast<std::uint64_t>(device()) << 32 | device();
}

Clock::time_point from_now(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

struct State {  // plain data: to fork is to copy it
  pb::Session place;  // all but the observation
  pb::Want want;
  pb::Limits limits;
  double lease = 0;  // seconds
  World world{0, 0};
  unsigned actions = 0;
  bool over = false;

  template <class Request>
  void begin(const Request& request, std::uint64_t seed) {
    place.set_seed(seed);
    place.set_dynamics_seed(request.has_dynamics_seed() ? request.dynamics_seed() : mix(mix(seed) + place.member()));
    place.set_step_index(0);
    world = World(seed, place.dynamics_seed());
    actions = 0;
    over = false;
  }
};

struct Memo {  // the reply to a request, for when it is asked again
  std::unique_ptr<Message> request, reply;

  bool holds(const Message& asked) const {
    return request && request->GetDescriptor() == asked.GetDescriptor() && MessageDifferencer::Equals(*request, asked);
  }
  void keep(const Message& asked, const Message& replied) {
    request.reset(asked.New());
    request->CopyFrom(asked);
    reply.reset(replied.New());
    reply->CopyFrom(replied);
  }
};

struct Session {
  State state;
  Memo stepped{}, reset{};
  std::mutex mutex{};           // held by the call that works on the session
  Clock::time_point expires{};  // guarded by the service's mutex

  grpc::Status refuse(const std::string& reason, const std::string& message) const {
    return failure(grpc::FAILED_PRECONDITION, reason, message,
                   {{"expected_epoch", std::to_string(state.place.epoch())},
                    {"expected_step_index", std::to_string(state.place.step_index())}});
  }
  template <class Request>
  void check_place(const Request& request) const {
    if (request.epoch() != state.place.epoch() || request.step_index() != state.place.step_index())
      throw refuse("OUT_OF_ORDER", "the session stands at another place");
  }
};

struct Key {
  std::mutex mutex;  // held by the call that creates the sessions
  Memo created;
  std::vector<std::weak_ptr<Session>> sessions;  // guarded by the service's mutex, as is the next
  Clock::time_point expires;
};

#define EACH_CALL(DO)                                                                                     \
  DO(Open, open) DO(Reset, reset) DO(Step, step) DO(Render, render) DO(Fork, fork) DO(Snapshot, snapshot) \
  DO(Restore, restore) DO(Renew, renew) DO(Close, close)

class Service final : public pb::EnvironmentService::Service {
 public:
  pb::DescribeResponse about;  // does not change once the server runs

  Service() {
    TextFormat::ParseFromString(kServer, &about);
    TextFormat::ParseFromString(World::kSpec, about.add_environments());
    about.set_instance_id(std::to_string(draw()));
  }

  grpc::Status Describe(grpc::ServerContext*, const pb::DescribeRequest* request, pb::DescribeResponse* reply) override {
    return attempt([&] {
      if (!request->environment_id().empty()) check_environment(request->environment_id());
      std::lock_guard lock(mutex_);
      *reply = about;
      reply->set_draining(draining_);
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
      for (const auto& call : request.calls()) {
        auto* reply = response.add_replies();
        reply->set_call_id(call.call_id());
        auto status = attempt([&] { work(call, reply); });
        if (call.timeout_ms() && Clock::now() - received > std::chrono::milliseconds(call.timeout_ms()))
          status = failure(grpc::DEADLINE_EXCEEDED, "DEADLINE", "done, but late: ask again", {{"advice", "retry"}});
        if (!status.ok()) reply->mutable_error()->ParseFromString(status.error_details());
      }
      if (response.replies_size()) stream->Write(response);
    }
    return grpc::Status::OK;
  }

  void drain() {
    std::lock_guard lock(mutex_);
    draining_ = true;
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
      throw bad_argument(request.options().fields().begin()->first, "this environment has no options");
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
    if (key->created.holds(request)) return reply->CopyFrom(*key->created.reply);
    if (key->created.request)
      throw failure(grpc::FAILED_PRECONDITION, "KEY_REUSED", "this key was used for another request: take a new one");
    std::vector<std::shared_ptr<Session>> made;
    for (unsigned i = 0; i < std::max(request.count(), 1u); ++i) {
      made.push_back(std::make_shared<Session>(make(i, request.first_member() + i)));
      made[i]->state.place.set_session_id(std::to_string(draw()) + "-" + std::to_string(draw()));
      made[i]->state.place.set_epoch(1);
      show(made[i]->state, reply->add_sessions());
    }
    std::lock_guard lock(mutex_);
    if (draining_) throw failure(grpc::UNAVAILABLE, "DRAINING", "the server is going away", {{"advice", "reopen"}});
    if (sessions_.size() + made.size() > about.limits().max_sessions()) {
      google::rpc::RetryInfo later;
      later.mutable_retry_delay()->set_seconds(1);
      throw failure(grpc::RESOURCE_EXHAUSTED, "OVERLOADED", "no room for more sessions",
                    {{"advice", "retry"}, {"limit", "max_sessions"}}, &later);
    }
    for (const auto& session : made) {
      session->expires = from_now(session->state.lease);
      sessions_[session->state.place.session_id()] = session;
    }
    key->sessions.assign(made.begin(), made.end());
    key->created.keep(request, *reply);
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
    if (!seeds.empty() && (!reseed || seeds.size() != static_cast<int>(std::max(request.count(), 1u))))
      throw bad_argument("dynamics_seeds", "give one per copy with RESEED, or none");
    create(request, reply, [&](unsigned i, unsigned member) {
      const auto original = find(request.session_id());
      std::lock_guard lock(original->mutex);
      original->check_place(request);
      State state = original->state;
      auto& place = state.place;
      place.set_member(member);
      if (reseed) {
        const auto derived = mix(mix(place.dynamics_seed() + place.step_index()) + member);
        place.set_dynamics_seed(seeds.empty() ? derived : seeds[static_cast<int>(i)]);
        state.world.reseed(place.dynamics_seed());
      }
      return state;
    });
  }

  void reset(const pb::ResetRequest& request, pb::ResetResponse* reply) {
    const auto session = find(request.session_id());
    std::lock_guard lock(session->mutex);
    State& state = session->state;
    if (session->reset.holds(request)) return reply->CopyFrom(*session->reset.reply);
    if (request.epoch() != state.place.epoch()) throw session->refuse("OUT_OF_ORDER", "not the current epoch");
    check_start(request);
    state.begin(request, request.has_seed() ? request.seed() : draw());
    state.place.set_epoch(request.epoch() + 1);
    if (request.has_want()) state.want = request.want();
    override(&state.limits, request.limits());
    show(state, reply->mutable_session());
    reply->set_instructions(spec().instructions());
    *reply->mutable_limits() = state.limits;
    session->stepped = {};
    session->reset.keep(request, *reply);
  }

  void step(const pb::StepRequest& request, pb::StepResponse* reply) {
    const auto session = find(request.session_id());
    std::lock_guard lock(session->mutex);
    pb::StepRequest played = request;
    played.clear_want();  // a repetition may want something else: its reply is the first one
    if (session->stepped.holds(played)) return reply->CopyFrom(*session->stepped.reply);
    session->check_place(request);
    if (session->state.over) throw session->refuse("EPISODE_OVER", "the episode is over: Reset");
    if (request.actions_size() > static_cast<int>(about.limits().max_step_actions()))
      throw bad_argument("actions", "more than max_step_actions");
    for (const auto& action : request.actions())
      if (!action.has_text()) throw bad_argument("actions", "this environment takes text alone");
    check_want(request.want());
    State state = session->state;  // a copy: if anything is thrown, nothing has changed
    play(request, &state, reply->mutable_transition());
    observe(state, request.has_want() ? request.want() : state.want, reply->mutable_transition()->mutable_observation());
    reply->set_next_step_index(state.place.step_index());
    session->state = std::move(state);
    session->reset = {};
    session->stepped.keep(played, *reply);
  }

  void play(const pb::StepRequest& request, State* state, pb::Transition* transition) const {
    const auto spent = [](unsigned used, unsigned limit) { return limit && used >= limit; };
    auto end = pb::END_REASON_UNSPECIFIED;
    unsigned executed = 0;
    for (const auto& action : request.actions()) {
      auto* outcome = transition->add_outcomes();
      const int number = find_action(action.text());
      const bool beyond = end || spent(executed, state->limits.max_actions_per_turn());
      outcome->set_valid(beyond || number >= 0);
      if (beyond || number < 0) continue;
      const auto result = state->world.step(number);
      outcome->set_executed(true);
      outcome->set_effective(result.effective);
      outcome->set_reward(result.reward);
      transition->set_reward(transition->reward() + result.reward);
      ++executed, ++state->actions;
      if (result.solved) end = pb::END_REASON_TERMINAL;
      else if (spent(state->actions, state->limits.max_actions())) end = pb::END_REASON_MAX_ACTIONS;
    }
    state->place.set_step_index(state->place.step_index() + 1);
    if (!end && spent(state->place.step_index(), state->limits.max_turns())) end = pb::END_REASON_MAX_TURNS;
    state->over = end;
    transition->set_end_reason(end);
    transition->set_terminated(end == pb::END_REASON_TERMINAL);
    transition->set_truncated(end && !transition->terminated());
    if (end) transition->set_success(transition->terminated());
  }

  void render(const pb::RenderRequest& request, pb::RenderResponse* reply) {
    const auto session = find(request.session_id());
    if (!request.mode().empty() && request.mode() != "text") throw bad_argument("mode", "there is only text");
    std::lock_guard lock(session->mutex);
    reply->set_mime("text/plain; charset=utf-8");
    reply->set_data(session->state.world.observation());
  }

  void snapshot(const pb::SnapshotRequest& request, pb::SnapshotResponse*) {
    find(request.session_id());
    throw unsupported("snapshot");
  }
  void restore(const pb::RestoreRequest&, pb::RestoreResponse*) { throw unsupported("snapshot"); }

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

  void observe(const State& state, const pb::Want& want, pb::Observation* to) const {
    const auto& names = spec().action_space().names();
    to->add_parts()->set_text(state.world.observation());
    if (want.state_key()) to->set_state_key(state.world.state_key());
    if (state.over) return;
    if (want.expert_action()) to->mutable_expert_action()->set_text(names[state.world.expert_action()]);
    for (int i = 0; want.valid_actions() && i < names.size(); ++i)
      if (state.world.allows(i)) to->add_valid_actions()->set_text(names[i]);
  }

  void show(const State& state, pb::Session* to) const {
    *to = state.place;
    observe(state, state.want, to->mutable_observation());
  }

  int find_action(std::string name) const {  // -1: there is none; case and the space around a name do not matter
    name.erase(0, name.find_first_not_of(" \t\r\n"));
    name.erase(name.find_last_not_of(" \t\r\n") + 1);
    const auto& names = spec().action_space().names();
    for (int i = 0; i < names.size(); ++i)
      if (strcasecmp(names[i].c_str(), name.c_str()) == 0) return i;
    return -1;
  }

  static void override(pb::Limits* limits, const pb::LimitOverrides& given) {
    limits->MergeFromString(given.SerializeAsString());  // the same fields, of which only those given are written
  }

  std::mutex mutex_;
  bool draining_ = false;
  std::unordered_map<std::string, std::shared_ptr<Session>> sessions_;
  std::unordered_map<std::string, std::shared_ptr<Key>> keys_;
};

int main(int argc, char** argv) {
  std::map<std::string, std::string> options{{"--host", "127.0.0.1"}, {"--port", "50051"}};
  for (int i = 1; i < argc; i += 2) {
    if (!options.count(argv[i]) || i + 1 == argc) return std::cerr << "usage: key_door_server [--host H] [--port N]\n", 2;
    options[argv[i]] = argv[i + 1];
  }
  sigset_t stop;  // blocked before there are other threads, so that all signals are waited for here
  sigemptyset(&stop);
  sigaddset(&stop, SIGTERM);
  sigaddset(&stop, SIGINT);
  pthread_sigmask(SIG_BLOCK, &stop, nullptr);

  Service service;
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(options["--host"] + ":" + options["--port"], grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  builder.SetMaxReceiveMessageSize(static_cast<int>(service.about.limits().max_message_bytes()));
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // a port that is taken is an error
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);  // callers probe connections
  const auto server = builder.BuildAndStart();
  if (!server || !port) return 1;
  const auto& id = service.about.environments(0).id();
  server->GetHealthCheckService()->SetServingStatus(id, true);
  std::cout << "Serving " << id << " on " << options["--host"] << ":" << port << std::endl;

  const timespec tick{0, 100'000'000};
  while (sigtimedwait(&stop, nullptr, &tick) < 0) service.reap();
  server->GetHealthCheckService()->SetServingStatus(false);
  service.drain();
  const auto end = from_now(10);
  while (service.reap() && Clock::now() < end && sigtimedwait(&stop, nullptr, &tick) < 0) continue;
  server->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
}
