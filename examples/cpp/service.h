// The calls of the contract. They run one at a time: each takes microseconds, and gRPC works in other threads.
// Each call changes sessions at its very end, so that a call that fails has changed nothing.
#pragma once
#include <atomic>
#include <chrono>
#include <mutex>
#include <random>
#include <regex>
#include <unordered_map>

#include "session.h"

#define EACH_CALL(DO)                                                                                     \
  DO(Open, open) DO(Reset, reset) DO(Step, step) DO(Render, render) DO(Fork, fork) DO(Snapshot, snapshot) \
  DO(Restore, restore) DO(Renew, renew) DO(Close, close)

inline double now() { return 1e-9 * std::chrono::steady_clock::now().time_since_epoch().count(); }  // seconds
inline std::uint64_t draw() {
  static std::random_device device;
  return static_cast<std::uint64_t>(device()) << 32 | device();
}

// Returns whether the version satisfies all comparators of a pin, such as ">=1.2.0,<2". Missing parts are 0.
inline bool fits(std::string pin) {
  static const std::regex form(R"( *([=!<>]=|[<>]?) *(\d+)(\.\d+)?(\.\d+)? *(,|$))");
  bool all = true;
  for (std::smatch part; !pin.empty(); pin = std::string(part.suffix())) {
    if (pin.size() > 256 || !std::regex_search(pin, part, form, std::regex_constants::match_continuous))
      throw bad_argument("version", "write comparators, as in '>=1.2.0,<2.0.0'");
    const auto wanted = part.str(2) + (part[3].matched ? part.str(3) : ".0") + (part[4].matched ? part.str(4) : ".0");
    const int order = strverscmp(spec.version().c_str(), wanted.c_str());
    const auto sign = part.str(1);
    all &= order ? sign == "!=" || sign[0] == (order < 0 ? '<' : '>') : sign != "!=" && sign != "<" && sign != ">";
  }
  return all;
}

class Service final : public pb::EnvironmentService::Service {
 public:
  std::atomic<bool> draining = false;

#define UNARY(Rpc, rpc)                                                                                        \
  grpc::Status Rpc(grpc::ServerContext*, const pb::Rpc##Request* request, pb::Rpc##Response* reply) override { \
    return attempt([&] { rpc(*request, reply); });                                                             \
  }
  UNARY(Describe, describe)
  EACH_CALL(UNARY)

  using Link = grpc::ServerReaderWriter<pb::StreamResponse, pb::StreamRequest>;
  grpc::Status Stream(grpc::ServerContext*, Link* link) override {
    for (pb::StreamRequest request; link->Read(&request);) {
      pb::StreamResponse response;
      for (const auto& call : request.calls()) {
        auto* reply = response.add_replies();
        reply->set_call_id(call.call_id());
        const auto status = attempt([&] { answer(call, reply); });
        if (!status.ok()) reply->mutable_error()->ParseFromString(status.error_details());
        if (response.replies_size() < 256) continue;  // more might not fit into a message
        link->Write(response);
        response.Clear();
      }
      if (response.replies_size()) link->Write(response);
    }
    return grpc::Status::OK;
  }

  // Removes expired sessions, and each key one lease after its session. Returns whether sessions are left.
  bool reap() {
    std::lock_guard lock(mutex_);
    const auto expired = [](const auto& entry) { return entry.second.expires < now(); };
    std::erase_if(sessions_, expired);
    for (const auto& [id, session] : sessions_)
      if (const auto key = keys_.find(session.key); key != keys_.end()) key->second.expires = now() + session.lease;
    std::erase_if(keys_, expired);
    return !sessions_.empty();
  }

 private:
  template <class Work>
  grpc::Status attempt(Work work) try {
    std::lock_guard lock(mutex_);
    work();
    return grpc::Status::OK;
  } catch (const grpc::Status& status) {
    return status;
  } catch (const std::exception& error) {
    return failure(grpc::INTERNAL, "ENVIRONMENT_BUG", error.what(), {{"session", "intact"}, {"exception", "C++"}});
  }
  void answer(const pb::Call& call, pb::Reply* reply) {
#define CASE(Rpc, rpc) if (call.has_##rpc()) return rpc(call.rpc(), reply->mutable_##rpc());
    EACH_CALL(CASE)
    throw bad_argument("request", "a call needs one");
  }

  void describe(const pb::DescribeRequest& request, pb::DescribeResponse* reply) {
    if (!request.environment_id().empty()) check_environment(request.environment_id());
    *reply = about;
    reply->set_instance_id(instance_id_);
    reply->set_draining(draining);
    reply->set_live_sessions(static_cast<unsigned>(sessions_.size()));
  }

  void open(const pb::OpenRequest& request, pb::OpenResponse* reply) {
    check_environment(request.environment_id());
    if (!fits(request.version()))
      throw failure(grpc::NOT_FOUND, "UNKNOWN_VERSION", "no version fits", {{"available", spec.version()}});
    const double asked = request.lease_seconds(), most = about.limits().max_lease_seconds();  // NaN is not above 0
    reply->set_lease_seconds(asked > 0 ? std::min(asked, most) : about.limits().default_lease_seconds());
    reply->set_environment_version(spec.version());
    reply->set_instructions(spec.instructions());
    reply->set_instance_id(instance_id_);
    const unsigned count = std::max(request.count(), 1u), first = request.first_member();
    if (request.key().size() > 128) throw bad_argument("key", "give at most 128 bytes");
    if (count > about.limits().max_group()) throw bad_argument("count", "give at most max_group");
    if (first + count - 1 < first) throw bad_argument("first_member", "members are numbered with 32 bits");
    const auto reused = failure(grpc::FAILED_PRECONDITION, "KEY_REUSED", "take a new key for another request");
    if (const auto known = keys_.find(request.key()); known != keys_.end())
      return known->second.repeat(request, reply, reused);
    if (draining) throw failure(grpc::UNAVAILABLE, "DRAINING", "the server is going away", {{"advice", "reopen"}});
    const auto seed = request.has_seed() ? request.seed() : draw();
    decltype(sessions_) made;
    for (unsigned i = 0; i < count; ++i) {
      Session session;
      session.key = request.key();
      session.lease = reply->lease_seconds();
      session.expires = now() + session.lease;
      session.place.set_epoch(1);
      session.place.set_session_id(std::to_string(draw()) + "-" + std::to_string(draw()));
      session.place.set_member(first + i);
      session.begin(request, seed);
      session.show(reply->add_sessions());
      *reply->mutable_limits() = session.limits;
      made.emplace(session.place.session_id(), session);
    }
    if (!request.key().empty())
      keys_[request.key()] = {identity(request), reply->SerializeAsString(), made.begin()->second.expires};
    sessions_.merge(made);
  }

  void reset(const pb::ResetRequest& request, pb::ResetResponse* reply) {
    auto& session = find(request.session_id());
    if (request.epoch() != session.place.epoch())
      return session.last.repeat(request, reply, session.misplaced("OUT_OF_ORDER"));
    Session next = session;
    next.begin(request, request.has_seed() ? request.seed() : draw());
    next.place.set_epoch(request.epoch() + 1);
    next.show(reply->mutable_session());
    reply->set_instructions(spec.instructions());
    *reply->mutable_limits() = next.limits;
    next.last = {identity(request), reply->SerializeAsString()};
    session = next;
  }

  void step(const pb::StepRequest& request, pb::StepResponse* reply) {
    auto& session = find(request.session_id());
    pb::StepRequest turn = request;
    turn.clear_want();  // a repeated call gets the first reply, even if it wants something else
    if (!session.at(request)) return session.last.repeat(turn, reply, session.misplaced("OUT_OF_ORDER"));
    if (session.over) throw session.misplaced("EPISODE_OVER");
    if (request.actions_size() > static_cast<int>(about.limits().max_step_actions()))
      throw bad_argument("actions", "give at most max_step_actions");
    for (const auto& action : request.actions())
      if (!action.has_text()) throw bad_argument("actions", "give texts alone");
    Session next = session;
    auto* transition = reply->mutable_transition();
    next.play(request, transition);
    next.observe(request.has_want() ? request.want() : next.want, transition->mutable_observation());
    reply->set_next_step_index(next.place.step_index());
    next.last = {identity(turn), reply->SerializeAsString()};
    session = next;
  }

  void render(const pb::RenderRequest& request, pb::RenderResponse* reply) {
    reply->set_data(find(request.session_id()).world.observation());
    reply->set_mime("text/plain; charset=utf-8");
    if (!request.mode().empty() && request.mode() != "text") throw bad_argument("mode", "there is only text");
  }
  grpc::Status lacks(const std::string& what, const std::string& id) { return find(id), unsupported(what); }
  void fork(const pb::ForkRequest& call, pb::ForkResponse*) { throw lacks("fork", call.session_id()); }
  void snapshot(const pb::SnapshotRequest& call, pb::SnapshotResponse*) { throw lacks("snapshot", call.session_id()); }
  void restore(const pb::RestoreRequest&, pb::RestoreResponse*) { throw unsupported("snapshot"); }
  void renew(const pb::RenewRequest& request, pb::RenewResponse* reply) {
    for (const auto& id : request.session_ids()) sessions_.count(id) ? void(find(id)) : reply->add_missing(id);
  }
  void close(const pb::CloseRequest& r, pb::CloseResponse*) { for (auto& id : r.session_ids()) sessions_.erase(id); }

  Session& find(const std::string& id) {  // renews its lease
    const auto found = sessions_.find(id);
    if (found == sessions_.end())
      throw failure(grpc::NOT_FOUND, "UNKNOWN_SESSION", "closed, or its lease ran out", {{"advice", "reopen"}});
    found->second.expires = now() + found->second.lease;
    return found->second;
  }
  static void check_environment(const std::string& id) {
    if (id == spec.id()) return;
    throw failure(grpc::NOT_FOUND, "UNKNOWN_ENVIRONMENT", "there is only " + spec.id(), {{"nearest", spec.id()}});
  }

  const std::string instance_id_ = std::to_string(draw());
  std::mutex mutex_;
  std::unordered_map<std::string, Session> sessions_;
  std::unordered_map<std::string, Memo> keys_;
};
